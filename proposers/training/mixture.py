"""The data mixture: which source is seen how often, packed into flat files of token ids.

Owns the order of the training text. A packed file is plain little-endian uint16; a position in it is a token count,
so a training run resumes at the exact token where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from random import Random

import numpy as np
from transformers import PreTrainedTokenizerFast

from . import conversations as chats
from .corpus import Conversation, Record, corpus_files, pieces, read_records
from .tokenizer import END_OF_TEXT, train_tokenizer

Document = Record | Conversation
TokenIds = np.ndarray                # [N] uint16


@dataclass(frozen=True)
class Source:
    """One way of reading one corpus file."""

    name: str
    file: str                        # short name of the corpus file, see corpus_files; "" needs none
    group: str                       # chat, code, docs, books or json
    share: float                     # of its group's tokens, relative to the group's other sources
    read: Callable[[Iterable[Record]], Iterator[Document]]


def plain(records: Iterable[Record]) -> Iterator[Document]:
    return chain.from_iterable(map(pieces, records))


def passages(records: Iterable[Record]) -> Iterator[Record]:
    """Short pieces, one passage's worth each."""
    return chain.from_iterable(pieces(record, 1500) for record in records)


SOURCES = (
    Source("oasst", "chat/oasst-octopack", "chat", 18, chats.dialogues),
    Source("oasst edits", "chat/oasst-octopack", "chat", 3, chats.edits),
    Source("gsm8k", "chat/gsm8k-train", "chat", 18, chats.dialogues),
    Source("tldr questions", "docs/tldr-en", "chat", 18, chats.command_pages),
    Source("persona chat", "chat/synthetic-persona-chat", "chat", 11, chats.dialogues),
    Source("chatterbot", "chat/chatterbot", "chat", 5, chats.dialogues),
    Source("taskmaster tools", "chat/taskmaster4-tools", "chat", 7, chats.tool_dialogues),
    Source("factbook questions", "json/factbook", "chat", 4, chats.countries),
    Source("list questions", "json/corpora", "chat", 2, chats.lists),
    Source("exercism questions", "code/exercism-python", "chat", 2, chats.exercises),
    Source("keon questions", "code/keon-algorithms", "chat", 2, chats.programs),
    Source("thealgorithms questions", "code/thealgorithms-python", "chat", 2, chats.programs),
    Source("stories", "books/children", "chat", 4, lambda records: chats.stories(passages(records))),
    Source("repetitions", "books/children", "chat", 2, lambda records: chats.repetitions(passages(records))),
    Source("introductions", "", "chat", 1, chats.introductions),
    Source("python stdlib", "code/python-stdlib", "code", 30, plain),
    Source("thealgorithms", "code/thealgorithms-python", "code", 35, plain),
    Source("keon", "code/keon-algorithms", "code", 15, plain),
    Source("geekcomputers", "code/geekcomputers-python", "code", 15, plain),
    Source("exercism", "code/exercism-python", "code", 5, plain),
    Source("tldr", "docs/tldr-en", "docs", 25, plain),
    Source("rust book", "docs/rust-book", "docs", 20, plain),
    Source("react docs", "docs/react-docs", "docs", 20, plain),
    Source("peps", "docs/python-peps", "docs", 20, plain),
    Source("rust rfcs", "docs/rust-rfcs", "docs", 15, plain),
    Source("children's books", "books/children", "books", 70, plain),
    Source("novels", "books/general", "books", 30, plain),
    Source("json lists", "json/corpora", "json", 50, plain),
    Source("factbook", "json/factbook", "json", 50, plain),
)

# The cool-down, a fifth of the tokens, leans towards chat; over the whole run chat is about half.
STABLE = {"chat": 0.45, "code": 0.22, "docs": 0.135, "books": 0.13, "json": 0.065}
COOLDOWN = {"chat": 0.70, "code": 0.13, "docs": 0.06, "books": 0.07, "json": 0.04}


def source_weights(groups: Mapping[str, float], sources: Sequence[Source]) -> dict[str, float]:
    """Share of all tokens per source name, adding up to 1 over the sources that are there."""
    totals = {group: sum(source.share for source in sources if source.group == group) for group in groups}
    weights = {source.name: groups[source.group] * source.share / totals[source.group] for source in sources}
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


@dataclass(frozen=True)
class PackedData:
    """Everything training and evaluation read, already tokenized."""

    stable: TokenIds
    cooldown: TokenIds
    held_out: dict[str, TokenIds]    # by group
    prompts: list[list[int]]         # held-out chats up to the assistant's first turn
    tokenizer: PreTrainedTokenizerFast


def prepare(data: Path, work: Path, tokens: int, vocab_size: int, seed: int = 0) -> PackedData:
    """Train the tokenizer and pack the mixture once; later calls find the files in `work` and load them.

    `tokens` bounds the length of the packed files. A longer training run begins them again.
    """
    if not (work / "data.json").exists():
        _pack_all(data, work, tokens, vocab_size, seed)
    index = json.loads((work / "data.json").read_text())
    return PackedData(
        stable=load_ids(work / "stable.bin"),
        cooldown=load_ids(work / "cooldown.bin"),
        held_out={group: load_ids(work / f"held_out_{group}.bin") for group in index["held_out"]},
        prompts=index["prompts"],
        tokenizer=PreTrainedTokenizerFast.from_pretrained(work / "tokenizer"),
    )


def _pack_all(data: Path, work: Path, tokens: int, vocab_size: int, seed: int) -> None:
    documents, sources = read_sources(data, seed)
    weights = source_weights(STABLE, sources)

    tokenizer = train_tokenizer(_tokenizer_sample(documents, weights), vocab_size)
    tokenizer.save_pretrained(work / "tokenizer")

    train = {name: [document for document in docs if not document.held_out] for name, docs in documents.items()}
    held_out = {name: [document for document in docs if document.held_out] for name, docs in documents.items()}
    encoded = {name: encode(docs, tokenizer, limit=int(2 * weights[name] * tokens) + 1) for name, docs in train.items()}
    cooldown_weights = source_weights(COOLDOWN, sources)
    for name, part, share, salt in (("stable", weights, 0.85, 0), ("cooldown", cooldown_weights, 0.3, 1)):
        packed = pack(encoded, part, int(share * tokens), seed + salt)
        packed.tofile(work / f"{name}.bin")

    groups = sorted({source.group for source in sources})
    for group in groups:
        names = [source.name for source in sources if source.group == group]
        ids = [encode(held_out[name], tokenizer, limit=50_000 // len(names)) for name in names]
        np.concatenate([np.empty(0, np.uint16), *chain.from_iterable(ids)]).tofile(work / f"held_out_{group}.bin")
    prompts = [prompt for docs in held_out.values() for prompt in first_turns(docs[:8], tokenizer)]
    index = {
        "held_out": groups,
        "prompts": prompts,
        "weights": {"stable": weights, "cooldown": cooldown_weights},
        "tokens_per_epoch": {name: sum(map(len, docs)) for name, docs in encoded.items()},
    }
    (work / "data.json").write_text(json.dumps(index, indent=1))


def read_sources(data: Path, seed: int) -> tuple[dict[str, list[Document]], list[Source]]:
    """All documents by source name, shuffled, and the sources that had any. A source without its file is left out."""
    files = corpus_files(data)
    documents: dict[str, list[Document]] = {}
    for source in SOURCES:
        if source.file and source.file not in files:
            continue
        docs = list(source.read(read_records(files[source.file]) if source.file else ()))
        Random(seed).shuffle(docs)
        if docs:
            documents[source.name] = docs
    if not any(source.file for source in SOURCES if source.name in documents):
        raise FileNotFoundError(f"no known corpus file under {data}; expected folders such as chat/ with *.jsonl.xz")
    return documents, [source for source in SOURCES if source.name in documents]


def _tokenizer_sample(
    documents: Mapping[str, Sequence[Document]], weights: Mapping[str, float], chars: int = 16_000_000
) -> Iterator[str]:
    """Text in the proportions of the mixture, without markers: those must not become ordinary merges."""
    for name, docs in documents.items():
        left = int(chars * weights[name])
        for document in docs:
            text = document.text if isinstance(document, Record) else "\n".join(
                message["content"] or json.dumps(message.get("tool_calls")) for message in document.messages)
            yield text
            left -= len(text)
            if left < 0:
                break


def encode(documents: Sequence[Document], tokenizer: PreTrainedTokenizerFast, limit: int) -> list[TokenIds]:
    """Token ids of each document, ended by <|endoftext|>, until `limit` tokens are reached."""
    encoded: list[TokenIds] = []
    total = 0
    for start in range(0, len(documents), 256):
        texts = [render(document, tokenizer) + END_OF_TEXT for document in documents[start:start + 256]]
        batch = tokenizer(texts, add_special_tokens=False)["input_ids"]
        encoded += [np.array(ids, dtype=np.uint16) for ids in batch]
        total += sum(map(len, batch))
        if total >= limit:
            break
    return encoded


def render(document: Document, tokenizer: PreTrainedTokenizerFast) -> str:
    if isinstance(document, Record):
        return document.text
    return str(tokenizer.apply_chat_template(document.messages, tools=document.tools or None, tokenize=False))


def first_turns(documents: Iterable[Document], tokenizer: PreTrainedTokenizerFast) -> Iterator[list[int]]:
    """Prompts that stop where the assistant should begin. Plain texts give none."""
    for document in documents:
        if isinstance(document, Conversation):
            roles = [message["role"] for message in document.messages]
            if "assistant" in roles:
                before = document.messages[:roles.index("assistant")]
                text = tokenizer.apply_chat_template(
                    before, tools=document.tools or None, tokenize=False, add_generation_prompt=True)
                ids = tokenizer(str(text), add_special_tokens=False)["input_ids"]
                if len(ids) <= 512:
                    yield ids


def pack(
    encoded: Mapping[str, Sequence[TokenIds]], weights: Mapping[str, float], tokens: int, seed: int
) -> TokenIds:
    """One stream of at least `tokens` tokens, whole documents, in which every source keeps to its weight throughout.

    The next document always comes from the source that is furthest behind. A source that runs out begins again in a
    new order.
    """
    names = [name for name in encoded if encoded[name] and weights[name] > 0]
    share = np.array([weights[name] for name in names])
    share /= share.sum()
    streams = [_endless(encoded[name], Random(f"{seed} {name}")) for name in names]
    given = np.zeros(len(names))
    stream: list[TokenIds] = []
    while given.sum() < tokens:
        behind = int(np.argmax(share * given.sum() - given))
        document = next(streams[behind])
        given[behind] += len(document)
        stream.append(document)
    return np.concatenate(stream)


def _endless(documents: Sequence[TokenIds], chance: Random) -> Iterator[TokenIds]:
    order = list(range(len(documents)))
    while True:
        chance.shuffle(order)
        for index in order:
            yield documents[index]


def load_ids(path: Path) -> TokenIds:
    return np.fromfile(path, dtype=np.uint16)
