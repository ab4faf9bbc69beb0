"""The embedded family's recipe as data, and the files a training of it starts from. Trains nothing."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from .corpus import Conversation
from .encoding import AnyDocument, Prompt, encode, prompts, texts_of
from .loop import Plan
from .mixture import RAW_CHATS, SOURCES, TEXTS, Stage, Streams, by_source, sample, weights
from .ngram_counts import CountLimits
from .optimizer import OptimizerSettings
from .packing import Document, write
from .schedule import Schedule
from .target import Shape
from .tokenizer import train_tokenizer

RECIPE = Path(__file__).with_name("family.toml")
HELD_OUT_TOKENS = 8192               # per domain
COUNTED = "ngram_cache"              # the method whose drafter is not trained


@dataclass(frozen=True)
class Training:
    """How one model of the family is trained."""

    tokens: int
    batch_tokens: int = 4096
    accumulate: int = 2
    text: bool = False               # of a drafter: read the target's last text before what the target says, of each its share
    schedule: Schedule = field(default_factory=Schedule)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)

    @staticmethod
    def read(table: dict[str, Any]) -> Training:
        """Take the training's keys out of `table`; what is left belongs to the model."""
        names = ("tokens", "batch_tokens", "accumulate", "text")
        numbers = {name: table.pop(name) for name in names if name in table}
        schedule, optimizer = Schedule(**table.pop("schedule", {})), OptimizerSettings(**table.pop("optimizer", {}))
        return Training(**numbers, schedule=schedule, optimizer=optimizer)

    def plan(self, stream_tokens: float, **options: Any) -> Plan:
        """Steps for `tokens` tokens when a batch holds `stream_tokens` on average."""
        steps = max(1, round(self.tokens / (self.accumulate * stream_tokens)))
        return Plan(steps=steps, accumulate=self.accumulate, schedule=self.schedule, optimizer=self.optimizer, **options)


@dataclass(frozen=True)
class Member:
    """A drafter of the family: its method's own settings, and how it is trained."""

    method: str
    settings: dict[str, Any]
    training: Training | None        # None: it is counted

    @staticmethod
    def read(table: dict[str, Any]) -> Member:
        method = table.pop("method")
        if method == COUNTED:
            CountLimits(**table)     # refuses a misspelt key
            return Member(method, table, None)
        training = Training.read(table)      # takes its keys
        return Member(method, table, training)


@dataclass(frozen=True)
class Answers:
    """What the target is asked, to have it write what drafters learn from."""

    prompts: int = 14_000
    held_out_prompts: int = 300
    prompt_tokens: int = 700         # longer prompts are left out
    answer_tokens: int = 200


@dataclass(frozen=True)
class Refinement:
    """What the target is asked once more, to learn from the best of what it says; see refine.py."""

    domains: tuple[str, ...]         # whose answers are to become better
    prompts: int                     # of these domains, each answered `samples` times, of which `kept` are kept at most
    other_prompts: int               # of the other domains, answered greedily: so that nothing is forgotten
    training: Training
    samples: int = 4
    kept: int = 2
    circles: float = 0.35            # answers that go round in circles, to be unlearned, for each good one
    temperatures: tuple[float, ...] = (0.7, 0.95)
    prompt_tokens: int = 600         # longer prompts are left out
    answer_tokens: int = 200

    @staticmethod
    def read(table: dict[str, Any]) -> Refinement:
        training = Training.read(table)
        for name in {"domains", "temperatures"} & table.keys():
            table[name] = tuple(table[name])
        return Refinement(**table, training=training)


@dataclass(frozen=True)
class Family:
    """A whole recipe."""

    seed: int
    vocab_size: int
    tokenizer_characters: int
    tokenizer_domains: dict[str, float]
    shape: Shape
    read_weight: float
    target: Training
    stages: tuple[Stage, ...]
    refinement: Refinement | None    # None: the target stays as its stages leave it
    answers: Answers
    members: dict[str, Member]       # by folder name

    @staticmethod
    def load(path: Path = RECIPE) -> Family:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        target = table["target"]
        shape, read_weight = Shape(**target.pop("shape")), target.pop("read_weight", 0.3)
        stages = tuple(Stage(stage["share"], stage["domains"]) for stage in target.pop("stages"))
        training = Training.read(target)
        if target:
            raise ValueError(f"{path}: [target] does not know {', '.join(target)}")
        members = {name: Member.read(member) for name, member in table.get("drafters", {}).items()}
        tokenizer = table["tokenizer"]
        refinement = Refinement.read(table["refinement"]) if "refinement" in table else None
        return Family(
            table["seed"], tokenizer["vocab_size"], tokenizer["characters"], tokenizer["domains"], shape, read_weight, training, stages,
            refinement, Answers(**table.get("answers", {})), members)


@dataclass(frozen=True)
class Prepared:
    """Files in a work folder, all derived from corpora and recipe."""

    work: Path

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return PreTrainedTokenizerFast.from_pretrained(self.work / "tokenizer")

    def stage(self, number: int) -> Path:
        return self.work / f"stage_{number}"

    @property
    def held_out(self) -> dict[str, Path]:
        """Packed held-out documents by domain."""
        return {path.stem: path.with_suffix("") for path in sorted((self.work / "held_out").glob("*.ids"))}

    def prompts(self, held_out: bool) -> list[tuple[str, Prompt]]:
        """(domain, prompt) of every chat that was (not) held out."""
        with (self.work / f"prompts_{'held_out' if held_out else 'train'}.jsonl").open(encoding="utf-8") as lines:
            return [(row.pop("domain"), Prompt(**row)) for row in map(json.loads, lines)]


def prepare(family: Family, data: Path, work: Path) -> Prepared:
    """Train the tokenizer and pack each stage's text once; a later call finds the files in `work`."""
    prepared = Prepared(work)
    if not (work / "tokenizer").exists():
        texts = by_source(data, (*TEXTS, *RAW_CHATS), family.seed)
        share = weights((*TEXTS, *RAW_CHATS), family.tokenizer_domains)
        train_tokenizer(texts_of(sample(texts, share, family.tokenizer_characters)), family.vocab_size).save_pretrained(work / "tokenizer")
    for number, stage in enumerate(family.stages):
        if not prepared.stage(number).with_suffix(".bounds").exists():
            used = [source for source in SOURCES if stage.domains.get(source.domain)]
            documents = by_source(data, used, family.seed)
            trained = {name: [document for document in docs if not document.held_out] for name, docs in documents.items()}
            mixed = Streams(trained, prepared.tokenizer, family.seed + number).mix(
                weights(used, stage.domains), int(stage.share * family.target.tokens))
            write(prepared.stage(number), mixed, family.vocab_size)
    return prepared


def hold_out(family: Family, data: Path, prepared: Prepared) -> None:
    """Write the held-out documents, packed by domain, and every chat's prompts, held out and trained on."""
    used = [source for source in SOURCES if any(stage.domains.get(source.domain) for stage in family.stages)]
    work, documents = prepared.work, by_source(data, used, family.seed)
    domain_of = {source.name: source.domain for source in used}
    for domain in dict.fromkeys(domain_of.values()):
        lists = [[document for document in documents[name] if document.held_out] for name in documents if domain_of[name] == domain]
        docs = chain.from_iterable(_in_turn(lists))
        write(work / "held_out" / domain, limited(encode(docs, prepared.tokenizer), HELD_OUT_TOKENS), family.vocab_size)
    for name, wanted in (("train", False), ("held_out", True)):
        part = {source: [document for document in docs if document.held_out is wanted] for source, docs in documents.items()}
        _write_prompts(work / f"prompts_{name}.jsonl", part, domain_of)


def limited(documents: Iterable[Document], tokens: int) -> Iterable[Document]:
    """Whole documents until `tokens` tokens are reached."""
    for document in documents:
        if tokens <= 0:
            return
        tokens -= len(document)
        yield document


def _in_turn(lists: Sequence[Sequence[AnyDocument]]) -> Iterable[list[AnyDocument]]:
    for place in range(max((len(docs) for docs in lists), default=0)):
        yield [docs[place] for docs in lists if place < len(docs)]


def _write_prompts(path: Path, documents: Mapping[str, Sequence[AnyDocument]], domain_of: Mapping[str, str]) -> None:
    with path.open("w", encoding="utf-8") as lines:
        for name, docs in documents.items():
            for document in docs:
                if isinstance(document, Conversation):
                    for prompt in prompts(document):
                        lines.write(json.dumps({"domain": domain_of[name], **asdict(prompt)}, ensure_ascii=False) + "\n")
