"""Reads a text that is still growing, by code that looks as if all of it were there.

Owns the text that is held back: what may still become a call's framing. Knows no format; a format is a `scan` that waits where
the text ends. However a text is cut into pieces, the same comes out; every limit counts characters, never pieces.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

SPACE = " \t\r\n"
MAX_SPACE = 64
"""Characters of white space before a marker that belong to the marker; longer runs are text."""
MAX_HELD = 4096
"""Characters of a value that is read whole before it is known what it belongs to."""

_PLAIN = re.compile(r'[^"\\{}\[\]]+')

T = TypeVar("T")
Waiting = Generator[None, None, T]
"""A step of reading: it yields where it needs more text, and returns what it read."""


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model to itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of this function begins."""

    name: str
    id: str | None = None  # as the model wrote it, where it writes one


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the arguments, as JSON text, of the call begun last."""

    text: str


Piece = Content | Reasoning | CallBegun | Arguments


class Scanner(ABC):
    """Text in, pieces out. `_text[_mark:_at]` has been read and is held; what lies before `_mark` is settled and forgotten."""

    def __init__(self) -> None:
        self._text = ""
        self._mark = 0
        self._at = 0
        self._ended = False
        self._cut = False
        self._ran_out = False  # whether more was looked for behind the end
        self._found: list[Piece] = []
        self._run: Waiting[None] | None = None  # None: not begun yet, as a subclass may have more to set up

    @abstractmethod
    def scan(self) -> Waiting[None]:
        """Read the text. What is left when it returns comes out as content."""

    def feed(self, text: str) -> list[Piece]:
        """What this text settles."""
        self._text = self._text[self._mark :] + text
        self._at -= self._mark
        self._mark = 0
        return self._advance()

    def finish(self, cut: bool = False) -> list[Piece]:
        """What is settled by there being no more text. cut: whether more would have come."""
        self._ended, self._cut = True, cut
        return self._advance()

    def _advance(self) -> list[Piece]:
        if self._run is None:
            self._run = self._all()
        next(self._run, None)
        found, self._found = self._found, []
        return found

    def _all(self) -> Waiting[None]:
        yield from self.scan()
        yield from self.until((), Content)

    # What a format is written with.

    def give(self, piece: Callable[[str], Piece], end: int | None = None) -> None:
        """The held text, up to `end` (where reading has come to), is settled: it comes out as `piece`."""
        end = self._at if end is None else end
        if end > self._mark:
            self._found.append(piece(self._text[self._mark : end]))
        self._mark = end

    def settle(self, *pieces: Piece) -> None:
        """The held text was framing: these come out in its stead."""
        self._mark = self._at
        self._found.extend(pieces)

    def more(self) -> Waiting[bool]:
        """Wait for text; False if there will be none."""
        while self._at >= len(self._text):
            if self._ended:
                self._ran_out = True
                return False
            yield
        return True

    def peek(self) -> Waiting[str]:
        """The next character; "" at the end."""
        return self._text[self._at] if (yield from self.more()) else ""

    def skip(self, word: str) -> Waiting[bool]:
        """Whether the text goes on with `word`, which then is read."""
        start = self._at - self._mark
        for char in word:
            if (yield from self.peek()) != char:
                self._at = self._mark + start
                return False
            self._at += 1
        return True

    def held_until(self, word: str, limit: int) -> Waiting[bool]:
        """Read up to the first `word` and the word itself, all of it held. False if `limit` characters come before, then nothing is read,
        or if the text ends, then all of it is."""
        start = self._at - self._mark
        while True:
            begin = self._mark + start
            end = begin + limit + len(word)
            place = self._text.find(word, begin, end)
            self._at = begin if place < 0 else place + len(word)
            if place >= 0 or len(self._text) >= end:
                return place >= 0
            self._at = len(self._text)
            if not (yield from self.more()):
                return False

    def space(self) -> Waiting[None]:
        """Read white space, as much as framing may have."""
        for _ in range(MAX_SPACE):
            char = yield from self.peek()
            if not char or char not in SPACE:
                return
            self._at += 1

    def until(self, markers: tuple[str, ...], piece: Callable[[str], Piece], space: bool = True) -> Waiting[str]:
        """Give the text out as `piece` up to the first marker, which is read but held, and with it `space` the white space before.

        Returns the marker, or "" at the end of the text.
        """
        while True:
            start, marker = self._first(markers)
            end = start if marker else len(self._text) - _num_held(self._text, self._at, markers)
            self.give(piece, self._before_space(end) if markers and space else end)
            self._at = start + len(marker) if marker else end
            if marker:
                return marker
            if self._ended:
                self._at = len(self._text)
                self.give(piece)
                return ""
            yield

    def _first(self, markers: tuple[str, ...]) -> tuple[int, str]:
        places = [(place, marker) for marker in markers if (place := self._text.find(marker, self._at)) >= 0]
        return min(places, default=(0, ""))

    def _before_space(self, end: int) -> int:
        """Where the white space begins that ends at `end`, if it is not too long."""
        start = end
        while start > max(self._mark, end - MAX_SPACE) and self._text[start - 1] in SPACE:
            start -= 1
        return start

    def string(self, limit: int) -> Waiting[str | None]:
        """Read a JSON string of at most `limit` characters and return what it says; None if there is none."""
        start = self._at - self._mark
        if (yield from self.peek()) != '"' or not (yield from self.value(limit)):
            return None
        try:
            said = json.loads(self._text[self._mark + start : self._at], strict=False)
            said.encode()  # a lone surrogate is no text
        except ValueError:
            return None
        return said

    def value(self, limit: int | None = None, piece: Callable[[str], Piece] | None = None) -> Waiting[bool]:
        """Read one JSON value by its brackets and quotes; False if the text or `limit` ends first.

        With a `piece` it is given out as it comes, whatever it is; else it is held.
        """
        depth, quoted, escaped, left = 0, False, False, limit
        while (yield from self.more()):
            text, at, size = self._text, self._at, len(self._text)
            if left is not None:
                size = min(size, at + left)
                left -= size - at
            done = False
            while at < size and not done:
                char = text[at]
                if escaped:
                    escaped = False
                elif char == "\\":
                    escaped = quoted
                elif char == '"':
                    quoted = not quoted
                    done = not quoted and depth == 0
                elif quoted or (depth and char not in "{}[]"):
                    plain = _PLAIN.match(text, at, size)
                    at = plain.end() - 1 if plain else at
                elif char in "{[":
                    depth += 1
                elif char in "]}" and depth:
                    depth -= 1
                    done = depth == 0
                elif not depth and (char in SPACE or char in ",]}"):  # behind a number or a word
                    self._at = at
                    return True
                at += 1
            self._at = at
            if piece is not None:
                self.give(piece)
            if done:
                return True
            if left == 0:
                return False
        return False


def _num_held(text: str, start: int, markers: tuple[str, ...]) -> int:
    """Characters at the end of text[start:] that may begin a marker."""
    longest = min(max(map(len, markers), default=1) - 1, len(text) - start)
    for length in range(longest, 0, -1):
        tail = text[len(text) - length :]
        if any(marker.startswith(tail) for marker in markers):
            return length
    return 0
