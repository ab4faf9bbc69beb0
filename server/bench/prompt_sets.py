"""Prompts to measure with: small sets of our own, published ones and anybody's from files, in one shape.

Reads JSON, JSON lines (either may be gzipped) and plain text. Knows neither servers nor tokens.
"""

import gzip
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "prompts"
OWN = ("edits", "json", "chat", "retrieval", "short", "maths")
ALL, RANDOM = "all", "random"
PUBLISHED = {
    "spec_bench": "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
    "mt_bench": "https://raw.githubusercontent.com/lm-sys/FastChat/main/fastchat/llm_judge/data/mt_bench/question.jsonl",
    "humanevalfix": "https://huggingface.co/datasets/bigcode/humanevalpack/resolve/main/data/python/data/humanevalpack.jsonl",
    "humaneval": "https://github.com/openai/human-eval/raw/master/data/HumanEval.jsonl.gz",
    "sharegpt": "https://huggingface.co/datasets/anon8231489123/ShareGPT_Vicuna_unfiltered/resolve/main/ShareGPT_V3_unfiltered_cleaned_split.json",
}
ANYTHING = ("custom", "file")  # names that say no more than that there is a path
USER, SYSTEM = ("user", "human"), ("system",)


class PromptSetError(Exception):
    """There is no such set, or a file is not one. The message says what to do."""


@dataclass(frozen=True)
class Prompt:
    """One conversation, as far as the user's side of it goes: the answers are the measured model's own."""

    turns: tuple[str, ...]  # what the user says, one after another; at least one
    category: str = ""
    system: str | None = None
    prediction: str | None = None  # what the answer will largely repeat: the code to be edited


def load(name: str, path: Path | None = None) -> list[Prompt]:
    """The set of that name, or the one in a file: name may be its path, too. Raises PromptSetError."""
    if path is None and name in (*OWN, ALL):
        return [prompt for one in (OWN if name == ALL else (name,)) for prompt in read(_own(one))]
    path = path or (Path(name) if Path(name).is_file() else None)
    if path is not None:
        return read(path)
    if name in PUBLISHED:
        raise PromptSetError(f"{name} does not come with foretoken: download {PUBLISHED[name]} and give the file with --dataset-path FILE")
    if name in ANYTHING:
        raise PromptSetError(f"--dataset {name} needs the file: --dataset-path FILE")
    known = f"{', '.join((*OWN, ALL, RANDOM))} (or {', '.join(PUBLISHED)} with its file)"
    raise PromptSetError(f"there is no prompt set and no file {name!r}: give a file, or one of {known}")


def _own(name: str) -> Path:
    return FOLDER / f"{name}.jsonl.gz"


def random_words(num_prompts: int, num_words: int, seed: int) -> list[Prompt]:
    """Prompts in which nothing can be guessed: words of our own sets in no order at all."""
    words = sorted({word for prompt in load(ALL) for turn in prompt.turns for word in turn.split() if word.isalpha()})
    draw = random.Random(seed)
    return [Prompt((" ".join(draw.choices(words, k=num_words)),), RANDOM) for _ in range(num_prompts)]


def read(path: Path) -> list[Prompt]:
    """The prompts of a file, in its order; records without anything from a user are left out. Raises PromptSetError."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except (OSError, EOFError, ValueError) as error:
        raise PromptSetError(f"{path} cannot be read: {error}") from error
    if Path(path.name.removesuffix(".gz")).suffix == ".txt":
        found = [Prompt((line,)) for line in text.splitlines() if line.strip()]
    else:
        found = [prompt for where, record in _records(path, text) if (prompt := _prompt(where, record)) is not None]
    if not found:
        raise PromptSetError(f"{path} has no prompts")
    return found


def _records(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Each record and where it stands: of a JSON array, or of JSON lines."""
    if text.lstrip().startswith("["):
        try:
            yield from ((f"{path}, record {number}", record) for number, record in enumerate(json.loads(text), 1))
        except ValueError as error:
            raise PromptSetError(f"{path} is no JSON: {error}") from None
        return
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: JSON strings may hold other line separators
        if line.strip():
            try:
                yield f"{path}, line {number}", json.loads(line)
            except ValueError as error:
                advice = "write one object a line, or name a file of plain prompts .txt"
                raise PromptSetError(f"{path}, line {number} is no JSON: {error}; {advice}") from None


def _prompt(where: str, record: Any) -> Prompt | None:
    match record:
        case str(text):
            return _of([text], {}) if text.strip() else None
        case {"turns": [*turns]}:
            return _of(turns, record)
        case {"buggy_solution": str(body), "declaration": str(head), "entry_point": str(name)}:
            return _fix(name, head + body, record)
        case {"messages": [*messages]} | {"conversations": [*messages]} | {"prompt": [*messages]}:
            return _dialogue(messages, record)
        case {"prompt": str(text)} | {"text": str(text)} | {"question": str(text)}:
            return _of([text], record)
    known = "turns, messages, conversations, prompt or text"
    raise PromptSetError(f"{where} has none of the fields that hold a prompt: {known}")


def _of(turns: Sequence[Any], record: Mapping[str, Any], system: str | None = None) -> Prompt | None:
    said = tuple(turn for turn in turns if isinstance(turn, str) and turn.strip())
    prediction = record.get("prediction")
    return Prompt(said, str(record.get("category") or ""), system, prediction if isinstance(prediction, str) else None) if said else None


def _fix(name: str, code: str, record: Mapping[str, Any]) -> Prompt:
    """A task of HumanEvalFix: code, the examples that it fails, and what to do."""
    examples = str(record.get("example_test") or record.get("test") or "").strip()
    tests = f"\n\nIt must pass:\n\n```\n{examples}\n```" if examples else ""
    ask = f"Fix bugs in {name}. Answer with the whole function and nothing else.\n\n```\n{code.rstrip()}\n```{tests}"
    return Prompt((ask,), "fix", prediction=code.rstrip() + "\n")


def _dialogue(messages: Sequence[Any], record: Mapping[str, Any]) -> Prompt | None:
    """OpenAI's messages (role, content) or ShareGPT's (from, value)."""
    said: list[str] = []
    system = None
    for message in messages:
        if isinstance(message, Mapping):
            role, text = message.get("role", message.get("from")), _content(message.get("content", message.get("value")))
            if role in USER:
                said.append(text)
            elif role in SYSTEM:
                system = text
    return _of(said, record, system)


def _content(content: Any) -> str:
    """A text, or the text parts of OpenAI's list of them."""
    parts = content if isinstance(content, list) else [{"text": content}]
    return "".join(part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str))
