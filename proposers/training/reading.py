"""Anybody's text as training data: jsonl with `text` or `messages`, text files, .xz of either, or folders of them. Names bad lines.

A line of jsonl is {"text": "..."} or {"messages": [...], "tools": [...]} in OpenAI's shape; `tools` may be missing, and any other
keys are left alone. Files of records that are called .json, as lines or as one array, are read as what they are. Knows no tokens.
"""

import io
import json
import logging
import lzma
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from .corpus import Conversation, Message, Record, content_key

log = logging.getLogger("foretoken.train")

JSON_LINES = (".jsonl", ".ndjson")
TEXTS = frozenset(
    """
    .txt .text .md .markdown .rst .tex .html .htm .xml .csv .tsv .json .yaml .yml .toml .ini .cfg .css .sql .sh .py .pyi .js .jsx .ts .tsx
    .java .kt .scala .go .rs .c .h .cc .cpp .cxx .hpp .cs .swift .rb .php .pl .lua .r .jl .hs .ml .ex .erl .clj .lisp .el .vim .ipynb .tf
    """.split()
)
"""Kinds of text files taken from a folder. A file that is named itself is read whatever it is called."""
ROLES = ("system", "developer", "user", "assistant", "tool")


class DataError(ValueError):
    """Training data that cannot be used: "FILE:LINE: what is wrong"."""


def read_data(paths: Sequence[Path]) -> Iterator[Record | Conversation]:
    """Every record of every file, in the order of the names. The same record comes once.

    Raises DataError: for a bad line, with file and line; for a path that is not there; and in the end if there was nothing.
    """
    seen: set[int] = set()
    for path in paths:
        before = len(seen)
        for file in data_files(path):
            for document in read_file(file):
                if document.key not in seen:
                    seen.add(document.key)
                    yield document
        if len(seen) == before:
            raise DataError(f"{path}: there is no text in it")


def data_files(path: Path) -> list[Path]:
    """The file itself, or all files of a folder that are read, by name; hidden ones are not. Says what it leaves out."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path}: there is no such file or folder")
    visible = [file for file in sorted(path.rglob("*")) if file.is_file() and not _hidden(file.relative_to(path))]
    chosen = [file for file in visible if _kind(file) in (*JSON_LINES, *TEXTS)]
    left_out = Counter(file.suffix or file.name for file in visible if file not in set(chosen))
    if left_out:
        kinds = ", ".join(f"{count} {kind}" for kind, count in left_out.most_common(5))
        log.warning("%s: left out, not known as text: %s%s", path, kinds, " and others" if len(left_out) > 5 else "")
    return chosen


def read_file(path: Path) -> Iterator[Record | Conversation]:
    """Records of one file. Raises DataError."""
    with _opened(path) as file:
        try:
            kind = _kind(path)
            yield from _json_lines(path, file) if kind in JSON_LINES else _json(path, file) if kind == ".json" else _whole(path, file)
        except (lzma.LZMAError, EOFError) as error:
            raise DataError(f"{path}: damaged .xz file ({error})") from error


def parse_record(line: Mapping[str, Any], origin: str) -> Record | Conversation:
    """One record of jsonl. Raises DataError without a place."""
    match line:
        case {"text": _, "messages": _}:
            raise DataError("has both `text` and `messages`: one record is one of them")
        case {"text": str(text)}:
            text = text.replace("\r\n", "\n")
            if not text.strip():
                raise DataError("`text` is empty")
            return Record(str(line.get("id", origin)), text, (), content_key(text))
        case {"text": text}:
            raise DataError(f"`text` is {_a(text)}, not a string")
        case {"messages": list(messages)}:
            tools = line.get("tools") or []
            if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in cast("list[Any]", tools)):
                raise DataError("`tools` is not a list of objects")
            if not messages:
                raise DataError("`messages` is empty")
            parsed = [_message(number, message) for number, message in enumerate(cast("list[Any]", messages), 1)]
            return Conversation(parsed, content_key(json.dumps([parsed, tools], sort_keys=True)), cast("list[Any]", tools))
        case {"messages": messages}:
            raise DataError(f"`messages` is {_a(messages)}, not a list")
        case _:
            keys = ", ".join(f"`{key}`" for key in list(line)[:6])
            raise DataError(f"has neither `text` nor `messages`{f', only {keys}' if keys else ''}")


def _json_lines(path: Path, file: BinaryIO) -> Iterator[Record | Conversation]:
    for number, raw in enumerate(file, 1):
        try:
            if not (text := raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()):
                continue
            yield _record(json.loads(text), f"{path.name}:{number}", "\\ud" in text.lower())
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:{number}: not UTF-8 at byte {error.start + 1} of the line") from error
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{number}: not JSON: {error.msg} at column {error.colno}") from error
        except DataError as error:
            raise DataError(f"{path}:{number}: {error}") from error


def _json(path: Path, file: BinaryIO) -> Iterator[Record | Conversation]:
    """Records, where the first is one: data sets are often called so. Anything else is text, such as a package.json in a folder of code."""
    raw = file.read()
    whole = _parsed(raw)
    records: list[Any] = cast("list[Any]", whole) if isinstance(whole, list) else [whole]
    if records and _is_record(records[0]):
        for number, record in enumerate(records, 1):
            try:
                yield _record(record, f"{path.name}:{number}", True)
            except DataError as error:
                raise DataError(f"{path}: record {number}: {error}") from error
    else:
        is_lines = _is_record(_parsed(raw.lstrip().partition(b"\n")[0]))
        yield from _json_lines(path, io.BytesIO(raw)) if is_lines else _whole(path, io.BytesIO(raw))


def _parsed(raw: bytes) -> Any:
    """None for what is no JSON."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _is_record(value: Any) -> bool:
    return isinstance(value, dict) and not {"text", "messages"}.isdisjoint(cast("dict[str, Any]", value))


def _record(value: Any, origin: str, may_be_broken: bool) -> Record | Conversation:
    """may_be_broken: JSON can spell halves of characters, which no tokenizer takes. Raises DataError without a place."""
    if not isinstance(value, dict):
        raise DataError(f"is {_a(value)}, not an object")
    if may_be_broken:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise DataError(f"holds half a character, a lone surrogate: {error.object[error.start]!r}") from error
    return parse_record(cast("dict[str, Any]", value), origin)


def _whole(path: Path, file: BinaryIO) -> Iterator[Record]:
    raw = file.read()
    try:
        text = raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not UTF-8, so not text") from error
    if text.strip():                 # an empty file, as __init__.py often is, is no mistake
        yield Record(str(path), text, (), content_key(text))


def _message(number: int, message: Any) -> Message:
    """A message with its content as one string or None, and the arguments of its calls as JSON text. Raises DataError."""
    match message:
        case {"role": str(role)} if role in ROLES:
            content, calls = message.get("content"), message.get("tool_calls") or []
        case {"role": role}:
            raise DataError(f"message {number}: role {role!r} is not one of {', '.join(ROLES)}")
        case _:
            raise DataError(f"message {number} has no `role`")
    if isinstance(content, list):
        parts = cast("list[Any]", content)
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
            raise DataError(f"message {number}: a part of `content` is not text")
        content = "\n".join(part["text"] for part in parts)
    if not isinstance(content, str | None):
        raise DataError(f"message {number}: `content` is {_a(content)}, not a string")
    if content is None and not calls:
        raise DataError(f"message {number} has no `content`")
    parsed: Message = {**message, "content": content}
    if calls:
        if not isinstance(calls, list):
            raise DataError(f"message {number}: `tool_calls` is {_a(calls)}, not a list")
        parsed["tool_calls"] = [_call(number, call) for call in cast("list[Any]", calls)]
    return parsed


def _call(number: int, call: Any) -> dict[str, Any]:
    match call:
        case {"function": {"name": str(), "arguments": str()}}:
            return call
        case {"function": {"name": str(name), "arguments": dict(arguments)}}:
            return {**call, "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}}
        case _:
            raise DataError(f'message {number}: a tool call is not {{"function": {{"name": ..., "arguments": ...}}}}')


def _opened(path: Path) -> BinaryIO:
    try:
        return cast(BinaryIO, lzma.open(path)) if path.suffix == ".xz" else path.open("rb")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def _kind(path: Path) -> str:
    """The suffix before .xz, in small letters."""
    return (Path(path.stem) if path.suffix == ".xz" else path).suffix.lower()


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _a(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
