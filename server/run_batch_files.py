"""The files of a batch: requests read line by line, answers written so that a killed run can go on where it stopped.

OpenAI's formats. An answer's line is written whole in one call; a last line that was cut off is dropped when the file is opened again.
"""

import fcntl
import json
import os
import stat
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_ID_CHARS = 512
INVALID = "invalid_line"
OK = 200


class BatchError(Exception):
    """The files are not what a batch needs; the message says what to change."""


@dataclass(frozen=True)
class Line:
    """One request, or what is wrong with it."""

    number: int  # from 1
    custom_id: str | None = None
    url: str = ""
    body: bytes = b""  # JSON
    fault: str | None = None

    def answer(self, status: int, request_id: str, body: Any) -> dict[str, Any]:
        """As the output has it."""
        return _entry(self.custom_id, {"status_code": status, "request_id": request_id, "body": body}, None)

    @property
    def refusal(self) -> dict[str, Any]:
        """The same of a line with a fault."""
        return _entry(self.custom_id, None, {"code": INVALID, "message": f"line {self.number}: {self.fault}", "line": self.number})


def read_lines(path: Path) -> Iterator[Line]:
    """All lines but empty ones; no two without a fault have the same custom_id. Raises BatchError."""
    first: dict[str, int] = {}
    if path.exists() and not path.is_file():
        raise BatchError(f"--input {path} is no ordinary file; it is read more than once, so write the requests to one")
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.strip():
                    continue
                line = _read(number, raw)
                if line.custom_id is not None and line.fault is None:
                    earlier = first.setdefault(line.custom_id, number)
                    if earlier != number:
                        line = Line(number, line.custom_id, fault=f"custom_id {line.custom_id!r} is that of line {earlier}, too")
                yield line
    except OSError as error:
        raise BatchError(f"--input {path} cannot be read: {error.strerror}") from error


class Answers:
    """The output file, ours alone while it is open."""

    def __init__(self, path: Path) -> None:
        """Raises BatchError: it cannot be written, another run does, or it holds something else."""
        self.path = path
        self.num_ok = self.num_failed = 0
        self._ids: set[str] = set()
        self._numbers: set[int] = set()  # of lines with a fault
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise BatchError(f"--output {path} cannot be written: {error.strerror}") from error
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):  # what a run goes on with is read from it
                raise BatchError(f"--output {path} is no ordinary file; name one")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read_earlier()
        except BlockingIOError:
            os.close(self._file)
            raise BatchError(f"--output {path} is being written by another run") from None
        except BaseException:
            os.close(self._file)
            raise

    def has(self, line: Line) -> bool:
        return line.number in self._numbers if line.fault is not None else line.custom_id in self._ids

    @property
    def num_lines(self) -> int:
        return len(self._ids) + len(self._numbers)

    def forget_fault(self, line: Line) -> None:
        """If it was refused once: it has been corrected since, and may be asked."""
        if line.number in self._numbers:
            self._numbers.remove(line.number)
            self.num_failed -= 1

    def others(self, ids: set[str], faulty: set[int]) -> str | None:
        """What is answered here and is neither a custom_id among `ids` nor the number of a line among `faulty`."""
        if self._ids <= ids:
            return next((f"a faulty line {number}" for number in self._numbers - faulty), None)
        return f"custom_id {next(iter(self._ids - ids))[:60]!r}"

    def add(self, entry: dict[str, Any]) -> None:
        """Written and, whatever becomes of this process, kept. Raises BatchError, as when the disk is full."""
        data = _encoded(entry) + b"\n"
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            raise BatchError(f"--output {self.path} cannot be written: {error.strerror}") from error
        self._count(entry)

    def close(self) -> None:
        os.close(self._file)

    def _read_earlier(self) -> None:
        end = 0
        with open(os.dup(self._file), "rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n"):
                    break
                try:
                    self._count(json.loads(raw))
                except (ValueError, LookupError, TypeError, AttributeError):
                    raise BatchError(f"--output {self.path} line {number} is no answer of a batch; name another file") from None
                end += len(raw)
        os.ftruncate(self._file, end)

    def _count(self, entry: dict[str, Any]) -> None:
        error, response = entry["error"], entry["response"]
        if error is not None and error.get("code") == INVALID:
            self._numbers.add(int(error["line"]))
        else:
            self._ids.add(str(entry["custom_id"]))
        if response is not None and response["status_code"] == OK:
            self.num_ok += 1
        else:
            self.num_failed += 1


def _read(number: int, raw: bytes) -> Line:
    try:
        entry = json.loads(raw)
        encoded = json.dumps(entry.get("body")).encode() if isinstance(entry, dict) else b""
    except (ValueError, RecursionError) as error:
        return Line(number, fault=f"not JSON: {error}")
    if not isinstance(entry, dict):
        return Line(number, fault="not a JSON object")
    custom_id, url, body = entry.get("custom_id"), entry.get("url"), entry.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARS:
        return Line(number, fault=f"custom_id must be a text of 1 to {MAX_ID_CHARS} characters")
    fault = None
    if entry.get("method") != "POST":
        fault = 'method must be "POST"'
    elif url not in URLS:
        fault = f"url must be one of {', '.join(URLS)}"
    elif not isinstance(body, dict):
        fault = "body must be an object"
    elif body.get("stream"):
        fault = "an answer in a file cannot be streamed; leave out body.stream"
    elif body.get("background"):
        fault = "an answer is waited for; leave out body.background"
    return Line(number, custom_id, str(url), encoded) if fault is None else Line(number, custom_id, fault=fault)


def _entry(custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None) -> dict[str, Any]:
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}


def _encoded(entry: dict[str, Any]) -> bytes:
    try:
        return json.dumps(entry, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half a surrogate pair in somebody's custom_id
        return json.dumps(entry).encode()
