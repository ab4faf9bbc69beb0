"""Values as programs write them: bare words and texts in quotes, in brackets. Qwen, Gemma and Pythonic formats have them in their calls."""

import ast
import json
import warnings
from abc import abstractmethod
from collections.abc import Container
from contextlib import suppress
from typing import ClassVar

from .parser import ToolParser, quoted
from .scanner import MAX_HELD, SPACE, Arguments, Piece, Waiting

_BARE = frozenset(("integer", "number", "boolean", "null"))
QUOTES = tuple(raw + quote for raw in ("", "r") for quote in ('"""', "'''", '"', "'"))
_DIGITS = {"x": 2, "u": 4, "U": 8}
"""Hexadecimal digits behind these letters, which stand behind a backslash."""


class LiteralParser(ToolParser):
    """A format whose calls have members, each a key and a value, in brackets."""

    brackets: ClassVar[dict[str, str]] = {"{": "}", "[": "]"}

    @abstractmethod
    def text(self, before: str) -> Waiting[bool]:
        """Read a text in quotes, if one begins here, and give it out as JSON, with `before` in front."""

    def members(self, closing: str, equals: str = ":", json_end: str = "}") -> Waiting[bool]:
        """Give members out as JSON, from behind their first bracket on. False, with the rest unread, if they break off.

        equals: what stands between a key and its value; deeper inside it is a colon. json_end: "]" for a list.
        """
        inside = [(closing, json_end)]  # brackets that are open, as they close here and in JSON
        due, comma = "key" if json_end == "}" else "value", ""
        while inside and (char := (yield from self.peek())):
            end, json_end = inside[-1]
            between = equals if len(inside) == 1 else ":"
            first = "key" if json_end == "}" else "value"
            if char in SPACE:
                self._at += 1
                self.settle()
            elif char == end and due in (first, "comma"):
                self._at += 1
                inside.pop()
                self.settle(Arguments(json_end))
                due, comma = "comma", ""
            elif due == "comma" and char == ",":
                self._at += 1
                self.settle()
                due, comma = first, ", "
            elif due == "equals" and char == between:
                self._at += 1
                self.settle(Arguments(": "))
                due = "value"
            elif due == "value" and char in self.brackets:
                self._at += 1
                inside.append((self.brackets[char], "}" if char == "{" else "]"))
                self.settle(Arguments(comma + ("{" if char == "{" else "[")))
                due, comma = "key" if char == "{" else "value", ""
            elif due not in ("key", "value"):
                break
            else:
                if not (yield from self.text(comma)):
                    ends = (between, end) if due == "key" else (*self.brackets, *self.brackets.values())
                    word = yield from self.word((",", *ends), MAX_HELD)
                    if not word or not (yield from self.more()):  # nothing that can be read, or cut
                        break
                    self.settle(Arguments(comma + (quoted(word) if due == "key" else as_json(word, _BARE))))
                due, comma = "equals" if due == "key" else "comma", ""
        if inside and (yield from self.more()):
            self._at = self._mark
        else:
            self.settle()
        return not inside

    def word(self, ends: Container[str], limit: int) -> Waiting[str]:
        """Read up to one of the characters that end it."""
        start = self._at - self._mark
        while (char := (yield from self.peek())) and char not in ends and self._at - self._mark < start + limit:
            self._at += 1
        return self._text[self._mark + start : self._at].strip()


class PythonLiterals(LiteralParser):
    """Texts in quotes as Python has them, and JSON."""

    brackets = LiteralParser.brackets | {"(": ")"}

    def text(self, before: str) -> Waiting[bool]:
        for opening in QUOTES:
            if (yield from self.skip(opening)):
                break
        else:
            return False
        self.settle(Arguments(before + '"'))
        quote = opening.removeprefix("r")
        markers = (quote, "\\") if opening == quote else (quote,)
        while marker := (yield from self.until(markers, escaped, space=False)):
            if marker == "\\":
                yield from self._escape()
            elif (yield from self.peek()).isalnum():  # an apostrophe: nothing of the kind stands behind a text
                self.give(escaped)
            else:
                self.settle(Arguments('"'))
                break
        return True

    def _escape(self) -> Waiting[None]:
        """Give out what a backslash and the characters behind it say; themselves if that is nothing."""
        kind = yield from self.peek()
        self._at += len(kind)
        digits, most = ("01234567", 2) if kind in tuple("01234567") else ("0123456789abcdefABCDEF", _DIGITS.get(kind, 0))
        for _ in range(most):
            if (yield from self.peek()) not in tuple(digits):
                break
            self._at += 1
        raw = self._text[self._mark : self._at]
        said = raw.removeprefix("\\") if kind == "/" else raw  # JSON's
        with suppress(SyntaxError, ValueError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            said = ast.literal_eval(f'"""{said}"""')
        self.settle(Arguments(json.dumps(said)[1:-1]))  # in ASCII, as half of a pair may be all there is


def escaped(text: str) -> Piece:
    """A part of a text as a part of a JSON string."""
    return Arguments(json.dumps(text, ensure_ascii=False)[1:-1])


def as_json(raw: str, kinds: frozenset[str]) -> str:
    """A bare value as JSON of one of these types; as a text if it is of none of them. Python's spelling is understood."""
    spelled = _from_python(raw.strip())
    try:
        kind = KINDS[type(json.loads(spelled, parse_constant=_no_json))]
    except (ValueError, RecursionError):
        kind = "string"
    fits = kind in kinds or (kind == "integer" and "number" in kinds)
    return spelled if fits and kind != "string" else json.dumps(raw, ensure_ascii=False)


def _from_python(text: str) -> str:
    """JSON of a value that is written as Python writes it; any other text as it is."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        if len(text) <= MAX_HELD:
            with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of odd escapes
                spelled = json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
                spelled.encode()  # a lone surrogate is no text
                return spelled
    return text


def _no_json(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


KINDS: dict[type, str] = {
    dict: "object", list: "array", str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null",
}
