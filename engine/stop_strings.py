"""Finds stop strings in a text that grows, at a cost that depends on nothing but the text. Knows no tokens."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hit:
    """A stop string that became complete."""

    stop: str
    end: int  # characters of the text just fed, up to the stop's end


class StopMatcher:
    """Finds the first of some strings in a growing text, one character at a time (Aho and Corasick, 1975).

    A state is the longest suffix of the text that begins a stop: its length is what must be held back. The cost does not
    depend on the number of stops nor on their length, so no choice of stops can slow the engine down.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]  # per state: character -> longer state
        self._depth = [0]
        self._complete: list[str | None] = [None]  # the longest stop that is a suffix of the state
        for stop in stops:
            self._insert(stop)
        self._fallback = [0] * len(self._next)  # the longest state that is a proper suffix of this one
        self._link()
        self._state = 0

    @property
    def num_held(self) -> int:
        """Trailing characters of the text that may begin a stop."""
        return self._depth[self._state]

    def feed(self, text: str) -> Hit | None:
        """Take in more text, up to the end of the first stop."""
        state, root = self._state, self._next[0]
        for index, char in enumerate(text):
            if not state and char not in root:
                continue
            state = self._step(state, char)
            stop = self._complete[state]
            if stop is not None:
                return Hit(stop, index + 1)
        self._state = state
        return None

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(char, 0)

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._complete.append(None)
            state = self._next[state][char]
        self._complete[state] = stop

    def _link(self) -> None:
        """Fallbacks breadth first: those of shorter states are known when a longer one asks."""
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for char, longer in self._next[state].items():
                self._fallback[longer] = self._step(self._fallback[state], char)
                waiting.append(longer)
            if self._complete[state] is None:
                self._complete[state] = self._complete[self._fallback[state]]
