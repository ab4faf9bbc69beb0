"""The demonstration family's text: which source is seen how often and when. Owns the order of everything its target reads.

First mostly plain text, which teaches the language; then mostly chats, which teach how to answer. Which source a document comes
from next is decided by what has been given so far, so each keeps to its share throughout.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from random import Random

from transformers import PreTrainedTokenizerFast

from .corpus import Conversation, Record, corpus_files, pieces, read_records
from .dialogues import (
    arithmetic,
    countries,
    edits,
    exercises,
    functions,
    introductions,
    json_schema,
    shell,
    small_exercises,
    small_talk,
    stories,
    text_tasks,
    tools,
)
from .encoding import AnyDocument, encode
from .packing import Document

Reader = Callable[[Iterable[Record]], Iterator[AnyDocument]]

PROGRAMS = ("code/thealgorithms-python", "code/keon-algorithms", "code/geekcomputers-python")


@dataclass(frozen=True)
class Source:
    """One way of reading some corpus files."""

    name: str
    domain: str
    share: float                     # of its domain's tokens, relative to the domain's other sources
    files: tuple[str, ...]           # short names of corpus files, see corpus_files; () needs none
    read: Reader


def plain(records: Iterable[Record]) -> Iterator[Record]:
    return chain.from_iterable(map(pieces, records))


TEXTS = (
    Source("python stdlib", "code", 20, ("code/python-stdlib",), plain),
    Source("programs", "code", 80, (*PROGRAMS, "code/exercism-python"), plain),
    Source("tldr", "docs", 30, ("docs/tldr-en",), plain),
    Source("rust book", "docs", 20, ("docs/rust-book",), plain),
    Source("react docs", "docs", 20, ("docs/react-docs",), plain),
    Source("peps", "docs", 20, ("docs/python-peps",), plain),
    Source("rust rfcs", "docs", 10, ("docs/rust-rfcs",), plain),
    Source("children's books", "books", 80, ("books/children",), plain),
    Source("novels", "books", 20, ("books/general",), plain),
    Source("json lists", "data", 40, ("json/corpora",), plain),
    Source("factbook", "data", 60, ("json/factbook",), plain),
)


def as_they_are(records: Iterable[Record]) -> Iterator[Conversation]:
    return (Conversation(list(record.messages), record.key) for record in records)


RAW_CHATS = tuple(
    Source(f"{name} as it is", "chat", share, (f"chat/{name}",), as_they_are)
    for name, share in {"gsm8k-train": 3, "oasst-octopack": 3, "synthetic-persona-chat": 2, "chatterbot": 1, "taskmaster4-tools": 2}.items()
)

CHATS = (
    Source("shell", "shell", 1, ("docs/tldr-en",), shell.shell),
    Source("exercises", "exercises", 1, (*PROGRAMS, "code/exercism-python"), exercises.exercises),
    Source("small exercises", "small_exercises", 1, (), small_exercises.small_exercises),
    Source("functions", "functions", 1, (*PROGRAMS, "code/python-stdlib"), functions.functions),
    Source("edits", "edits", 1, (*PROGRAMS, "code/python-stdlib"), edits.edits),
    Source("countries", "facts", 60, ("json/factbook",), countries.countries),
    Source("extraction", "facts", 40, ("json/factbook",), countries.extraction),
    Source("json", "json", 75, ("json/corpora",), json_schema.json_schema),
    Source("lists", "json", 25, ("json/corpora",), json_schema.lists),
    Source("grade school", "arithmetic", 40, ("chat/gsm8k-train",), arithmetic.word_problems),
    Source("arithmetic", "arithmetic", 60, (), arithmetic.arithmetic),
    Source("orders", "tools", 35, ("chat/taskmaster4-tools",), tools.orders),
    Source("everyday tools", "tools", 65, (), tools.everyday_tools),
    Source("text tasks", "talk", 34, (), text_tasks.text_tasks),
    Source("small talk", "talk", 26, (), small_talk.small_talk),
    Source("persona chat", "talk", 26, ("chat/synthetic-persona-chat",), small_talk.personas),
    Source("introductions", "talk", 8, (), introductions.introductions),
    Source("assistant", "talk", 5, ("chat/oasst-octopack",), small_talk.assistant_chats),
    Source("chatterbot", "talk", 1, ("chat/chatterbot",), small_talk.trivia),
    Source("stories", "stories", 1, ("books/children",), stories.stories),
)
SOURCES = (*TEXTS, *CHATS)


@dataclass(frozen=True)
class Stage:
    """A stretch of the training: its share of all tokens, and the share of each domain in it."""

    share: float
    domains: Mapping[str, float]


def by_source(data: Path, sources: Sequence[Source], seed: int) -> dict[str, list[AnyDocument]]:
    """All documents by source name, shuffled. Raises FileNotFoundError, naming every corpus file that is missing."""
    files = corpus_files(data)
    missing = sorted({name for source in sources for name in source.files} - files.keys())
    if missing:
        raise FileNotFoundError(f"{data} lacks {', '.join(missing)} (.jsonl or .jsonl.xz): see `foretoken train fetch-data`")
    documents: dict[str, list[AnyDocument]] = {}
    for source in sources:
        records = chain.from_iterable(read_records(files[name]) for name in source.files)
        documents[source.name] = list(source.read(records))
        if not documents[source.name]:
            raise ValueError(f"the corpora under {data} give nothing for {source.name!r}: {', '.join(source.files)}")
        Random(f"{seed} {source.name}").shuffle(documents[source.name])
    return documents


def weights(sources: Sequence[Source], domains: Mapping[str, float]) -> dict[str, float]:
    """Share of all tokens by source name, adding up to 1; `domains` need not."""
    totals = {domain: sum(source.share for source in sources if source.domain == domain) for domain in domains}
    whole = sum(domains.values())
    return {
        source.name: domains[source.domain] / whole * source.share / totals[source.domain]
        for source in sources if domains.get(source.domain)
    }


class Streams:
    """Endless documents of each source, encoded once; a source that runs out begins again in a new order."""

    def __init__(self, documents: Mapping[str, Sequence[AnyDocument]], tokenizer: PreTrainedTokenizerFast, seed: int):
        self.encoded: dict[str, list[Document]] = {name: [] for name in documents}
        self.streams = {name: self._endless(name, encode(texts, tokenizer), Random(f"{seed} {name}")) for name, texts in documents.items()}

    def _endless(self, name: str, fresh: Iterator[Document], chance: Random) -> Iterator[Document]:
        kept = self.encoded[name]
        for document in fresh:
            kept.append(document)
            yield document
        while True:
            chance.shuffle(kept)
            yield from list(kept)

    def mix(self, share: Mapping[str, float], tokens: int) -> Iterator[Document]:
        """Whole documents, at least `tokens` tokens: the next one always comes from the source that is furthest behind."""
        given = dict.fromkeys(share, 0)
        total = 0
        while total < tokens:
            behind = max(share, key=lambda name: share[name] * (total + 1) - given[name])
            document = next(self.streams[behind])
            given[behind] += len(document)
            total += len(document)
            yield document


def sample(documents: Mapping[str, Sequence[AnyDocument]], share: Mapping[str, float], characters: int) -> Iterator[AnyDocument]:
    """Documents in the proportions of `share`, for the tokenizer to learn from."""
    for name, part in share.items():
        left = part * characters
        for document in documents[name]:
            yield document
            left -= len(document.text) if isinstance(document, Record) else sum(len(m["content"] or "") for m in document.messages)
            if left < 0:
                break
