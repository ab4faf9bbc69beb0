"""Colours of the terminal: each token in the colour that the chat page gives to whoever said it. Plain text where colours are not wanted.

The colours are those of the page's stylesheet: legible on white and on black, and told apart by colour-blind people.
"""

import os
from collections.abc import Mapping
from typing import TextIO

PALETTE = ("#0072b2", "#c25400", "#00805d", "#aa4a86", "#857300", "#5f57a8")
FIXED = {"ngram": 1, "suffix": 2, "prediction": 4, "ngram_cache": 5}  # proposers that many servers have look the same on all of them
FREE = (0, 3, 5)  # for the others, in the order they become known; few servers have a third
WHEN = ("auto", "always", "never")
RESET = "\x1b[0m"
# What a model says is data: an escape in it could rewrite the screen or the clipboard.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if code not in (0x09, 0x0A)}


class Painter:
    """Colours text for one stream. when: auto = if the stream is a terminal and NO_COLOR is not set, always, never."""

    def __init__(self, stream: TextIO, when: str = "auto") -> None:
        self.is_terminal = stream.isatty()
        wanted = self.is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self.colours = wanted if when == "auto" else when == "always"
        self._full = os.environ.get("COLORTERM") in ("truecolor", "24bit")
        self._others: list[str] = []

    def token(self, text: str, proposer: str | None) -> str:
        """proposer: who guessed it; None = the target, whose tokens stay as they are."""
        shown = self.harmless(text)
        return shown if proposer is None or not self.colours or not shown else self._sequence(proposer) + shown + RESET

    def dim(self, text: str) -> str:
        return f"\x1b[2m{text}{RESET}" if self.colours and text else text

    def bold(self, text: str) -> str:
        return f"\x1b[1m{text}{RESET}" if self.colours else text

    def bad(self, text: str) -> str:
        return f"\x1b[31m{text}{RESET}" if self.colours else text

    def harmless(self, text: str) -> str:
        """On a terminal: control characters but tabs and line ends are shown, not obeyed."""
        return text.translate(_CONTROLS) if self.is_terminal or self.colours else text

    def legend(self, tokens: Mapping[str | None, int]) -> str:
        """{None: 9, "ngram": 11} -> `target 45%, ngram 55%`, each name in its colour."""
        total = sum(tokens.values()) or 1
        ranked = sorted(tokens.items(), key=lambda item: (item[0] is not None, -item[1]))
        return ", ".join(f"{self.token(name or 'target', name)} {100 * count / total:.0f}%" for name, count in ranked)

    def _sequence(self, proposer: str) -> str:
        red, green, blue = (int(self.colour(proposer)[i : i + 2], 16) for i in (1, 3, 5))
        if self._full:
            return f"\x1b[38;2;{red};{green};{blue}m"
        return f"\x1b[38;5;{16 + 36 * _level(red) + 6 * _level(green) + _level(blue)}m"

    def colour(self, proposer: str) -> str:
        if proposer in FIXED:
            return PALETTE[FIXED[proposer]]
        if proposer not in self._others:
            self._others.append(proposer)
        return PALETTE[FREE[self._others.index(proposer) % len(FREE)]]


def _level(value: int) -> int:
    """The nearest of the six levels of the 256 colours: 0, 95, 135, 175, 215, 255."""
    levels = (0, 95, 135, 175, 215, 255)
    return min(range(6), key=lambda i: abs(levels[i] - value))
