"""`foretoken train target`: a tokenizer and a Llama-shaped model from scratch, from anybody's text to a folder that can be served."""

import random
import shlex
from collections.abc import Iterator
from dataclasses import asdict

import torch
from transformers import PreTrainedTokenizerFast

from ...proposers.training.corpus import Conversation, pieces
from ...proposers.training.encoding import AnyDocument, encode, texts_of
from ...proposers.training.packing import Document
from ...proposers.training.target import Shape, TargetTrainee, write_model
from ...proposers.training.tokenizer import train_tokenizer
from .options import TargetOptions
from .run import Machine, WorkFolder, cut, log, open_to_readers, read_shuffled, train

TOKENIZER_CHARACTERS = 30_000_000    # are plenty to count merges in
CHARACTERS_PER_TOKEN = 3             # about, and rather too few: long texts are cut into pieces that fill the context


def train_target(options: TargetOptions) -> None:
    """Train and export. Raises DataError; KeyboardInterrupt when asked to stop."""
    training, sources = options.training, options.training.sources
    machine = Machine.choose(training.device, training.precision)
    sizes = asdict(options.sizes)
    folder = WorkFolder.claim(sources, {**sizes, "vocab_size": options.vocab_size, "context": options.context})
    tokenizer = _prepare(options, folder)
    torch.manual_seed(sources.seed)
    model = Shape(**sizes).build(len(tokenizer))
    model.config.max_position_embeddings = options.context       # of a mask's and a cache's concern only: RoPE has no table
    curves = train(TargetTrainee(model), folder, "text", training, machine)
    write_model(model, tokenizer, sources.out)
    open_to_readers(sources.out)
    print(f"trained {sources.out} (curves and log in {curves}); serve it with\n  foretoken serve {shlex.quote(str(sources.out))}")


def _prepare(options: TargetOptions, folder: WorkFolder) -> PreTrainedTokenizerFast:
    """Tokenizer and packed text, made once."""
    trained = folder.path / "tokenizer"
    if folder.has("text"):
        return PreTrainedTokenizerFast.from_pretrained(trained)
    documents = read_shuffled(options.training.sources)
    log.info("training the tokenizer")
    tokenizer = train_tokenizer(_some(documents), options.vocab_size)
    tokenizer.model_max_length = options.context
    tokenizer.save_pretrained(trained)
    folder.pack("text", _encoded(documents, tokenizer, options.context, options.training.sources.seed), len(tokenizer))
    return tokenizer


def _some(documents: list[AnyDocument]) -> Iterator[str]:
    left = TOKENIZER_CHARACTERS
    for text in texts_of(documents):
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def _encoded(documents: list[AnyDocument], tokenizer: PreTrainedTokenizerFast, context: int, seed: int) -> Iterator[tuple[bool, Document]]:
    """(is held out, document), each of at most `context` tokens, in an order of its own: parts of one long text lie far apart."""
    parts: list[AnyDocument] = []
    for document in documents:
        parts.extend([document] if isinstance(document, Conversation) else pieces(document, CHARACTERS_PER_TOKEN * context))
    random.Random(seed).shuffle(parts)
    for part, encoded in zip(parts, encode(parts, tokenizer), strict=True):
        yield from ((part.held_out, short) for short in cut(encoded, context))
