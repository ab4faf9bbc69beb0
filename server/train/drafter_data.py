"""What drafters learn from: prompts out of anybody's text, the target's answers to them, packed. Knows no drafter.

Chats are prompts at each turn of the assistant, and at their end if it has yet to answer; of plain text each piece's beginning is one,
which the target continues.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ...engine.model_folder import find_folder
from ...proposers.training.corpus import Record, pieces
from ...proposers.training.encoding import AnyDocument, Prompt, encode_prompt, prompts, render
from ...proposers.training.packing import Document, PackedFile
from ...proposers.training.reading import DataError
from .generating import Generation, documents, generate
from .options import Prompting, Sources
from .run import WorkFolder, cut, log, read_shuffled

ANSWERS, TEXT = "answers", "text"    # packed files


@dataclass(frozen=True)
class PromptTokens:
    """One prompt, and which side of the split its record is on."""

    token_ids: list[int]
    held_out: bool


@dataclass(frozen=True)
class DrafterData:
    """Packed files of one target in a work folder."""

    folder: WorkFolder
    target: Path
    tokenizer: PreTrainedTokenizerFast


def prepare(sources: Sources, model: str, prompting: Prompting, folder: WorkFolder, ground_truth: bool) -> DrafterData:
    """Have the target answer, and pack its answers; with `ground_truth` also the data as it is, all of it to be learned.

    What is there already is not made again. Raises DataError, and what `generate` raises.
    """
    target = find_folder(model, None, log.info)
    tokenizer: Any = AutoTokenizer.from_pretrained(target)
    data = DrafterData(folder, target, tokenizer)
    if folder.has(ANSWERS) and (folder.has(TEXT) or not ground_truth):
        return data
    texts = read_shuffled(sources)
    if ground_truth and not folder.has(TEXT):
        folder.pack(TEXT, _ground_truth(texts, tokenizer), len(tokenizer))
    if not folder.has(ANSWERS):
        chosen = choose_prompts(texts, tokenizer, prompting, sources.seed)
        settings = Generation(prompting.answer_tokens, sources.seed, prompting.batch)
        answers = generate(str(target), [prompt.token_ids for prompt in chosen], folder.path / "answers.jsonl", settings)
        answered = ((chosen[answer.number].held_out, document) for answer in answers for document in documents([answer]))
        folder.pack(ANSWERS, answered, len(tokenizer))
    return data


def choose_prompts(
    texts: Sequence[AnyDocument], tokenizer: PreTrainedTokenizerFast, prompting: Prompting, seed: int
) -> list[PromptTokens]:
    """At most `prompting.prompts` of them, at random. Raises DataError for chats if the target has no chat template."""
    bar = tqdm(texts, desc="prompts", unit=" records", dynamic_ncols=True, leave=False, disable=None)
    found: list[tuple[AnyDocument, Any]] = []
    for text in bar:
        if isinstance(text, Record):
            found.extend((piece, None) for piece in pieces(text))
        else:
            found.extend((text, prompt) for prompt in prompts(text))
            if text.messages[-1]["role"] not in ("assistant", "system", "developer"):  # a question without an answer: the target has one
                found.append((text, Prompt(text.messages, text.tools, {"role": "assistant", "content": ""})))
    random.Random(seed).shuffle(found)
    del found[prompting.prompts:]
    if tokenizer.chat_template is None and any(prompt is not None for _, prompt in found):
        raise DataError("the target has no chat template, so it cannot be asked `messages`: give data with `text`")
    chosen: list[PromptTokens] = []
    for document, prompt in tqdm(found, desc="prompts", unit=" prompts", dynamic_ncols=True, leave=False, disable=None):
        if prompt is None:
            assert isinstance(document, Record)
            ids = list(tokenizer(document.text)["input_ids"])        # with a beginning-of-text token, where the target wants one
            ids = ids[:max(1, min(prompting.prompt_tokens, len(ids) // 2))]
        else:
            ids = encode_prompt(prompt, tokenizer)
        chosen.append(PromptTokens(ids, document.held_out))
    return chosen


def learned_counts(path: Path, vocab_size: int) -> np.ndarray:
    """[vocab_size] int64: how often the packed file's learned tokens are each token."""
    file = PackedFile(path)
    return np.bincount(file.token_ids[file.learn.astype(bool)], minlength=vocab_size)


def _ground_truth(texts: Sequence[AnyDocument], tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[bool, Document]]:
    """The data itself; every token is learned, as the targets' own texts are."""
    for text in texts:
        for part in pieces(text) if isinstance(text, Record) else (text,):
            ids = np.array(tokenizer(render(part, tokenizer), add_special_tokens=isinstance(part, Record))["input_ids"], np.uint32)
            whole = Document(ids, np.ones(len(ids), np.uint8))
            yield from ((part.held_out, short) for short in cut(whole, min(2048, int(tokenizer.model_max_length))))
