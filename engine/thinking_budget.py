"""How long a model may reason: once its budget is spent, the marker that ends reasoning has to come.

What has to come at a place depends on the output's tokens before it alone, guessed or not, so that guesses change nothing. Markers are
found in the text, as whoever reads the answer finds them. Knows no logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..kernels.layout import MAX_TREE_TOKENS
from .errors import InvalidRequest
from .token_mask import Mask

MAX_SPACE = 64
"""Bytes of white space that may come before the marker that begins reasoning."""
PATIENCE = 3
"""Tokens that a character may take which the budget would cut in the middle."""


@dataclass(frozen=True)
class ThinkingBudget:
    """max_tokens of reasoning between `begin` and `end`. inside: the output begins behind `begin`. call: ends reasoning, too, as what
    it begins; "" if nothing does."""

    max_tokens: int
    begin: str
    end: str
    inside: bool
    call: str = ""

    def __post_init__(self) -> None:
        if type(self.max_tokens) is not int or self.max_tokens < 0:
            raise InvalidRequest("thinking_token_budget must be an integer from 0", "thinking_token_budget")


class ThinkingState:
    """One output's place in its reasoning. It follows token_ids (a live view) by itself; looking ahead leaves no trace."""

    def __init__(
        self, budget: ThinkingBudget, end_ids: Sequence[int], piece: Callable[[int], bytes], token_ids: Sequence[int], vocab_size: int
    ) -> None:
        """end_ids: the end marker in tokens. piece(token): its bytes. The output starts behind token_ids."""
        self._limit = budget.max_tokens
        self._begin, self._ends = budget.begin.encode(), tuple(marker.encode() for marker in (budget.end, budget.call) if marker)
        self._end_ids = end_ids
        self._piece = piece
        self._token_ids = token_ids
        self._start = self._num_known = len(token_ids)
        self._known = _Place("inside" if budget.inside else "before")
        self._masks = {token: Mask.of([token], vocab_size) for token in end_ids}

    @property
    def watches(self) -> bool:
        """Whether anything may have to come in the next step."""
        if len(self._token_ids) - self._start + MAX_TREE_TOKENS < self._limit:
            return False
        self._follow()
        return self._known.phase != "after"

    def forced(self, path: Sequence[int]) -> int | None:
        """The token that has to come behind the known ones and a path of guesses; None if any may."""
        if len(self._token_ids) - self._start + len(path) < self._limit:
            return None
        self._follow()
        place = self._known
        for token in path:
            place = self._behind(place, token)
        return self._due(place)

    def mask(self, path: Sequence[int]) -> Mask | None:
        """The same as a mask that allows no other."""
        token = self.forced(path)
        return None if token is None else self._masks[token]

    def _follow(self) -> None:
        for token in self._token_ids[self._num_known :]:
            self._known = self._behind(self._known, token)
        self._num_known = len(self._token_ids)

    def _due(self, place: _Place) -> int | None:
        if place.phase != "inside" or place.num_tokens < self._limit:
            return None
        if place.num_forced == 0 and _is_cut(place.tail) and place.num_tokens < self._limit + PATIENCE:
            return None
        return self._end_ids[place.num_forced]

    def _behind(self, place: _Place, token: int) -> _Place:
        if place.phase == "after":
            return place
        if self._due(place) is not None:
            done = place.num_forced + 1
            return replace(place, num_forced=done, phase="after" if done == len(self._end_ids) else "inside")
        text = place.tail + self._piece(token)
        if place.phase == "before":
            said = text.lstrip()
            if said.startswith(self._begin):
                return _Place("inside", tail=said[len(self._begin) :])
            waits = self._begin.startswith(said) and len(text) <= MAX_SPACE + len(self._begin)
            return _Place("before", tail=text) if waits else _Place("after")
        if any(end in text for end in self._ends):
            return _Place("after")
        return _Place("inside", place.num_tokens + 1, text[-max(*(len(end) - 1 for end in self._ends), 4) :])


@dataclass(frozen=True, slots=True)
class _Place:
    phase: Literal["before", "inside", "after"]
    num_tokens: int = 0  # of reasoning
    tail: bytes = b""  # of the text: what a marker may have begun in
    num_forced: int = 0  # tokens of the end marker that have come because they had to


def _is_cut(tail: bytes) -> bool:
    """Whether a text with this end breaks off inside of a character."""
    for length in range(1, min(len(tail), 3) + 1):
        first = tail[-length]
        if first & 0xC0 != 0x80:  # the character's first byte tells its length
            return first >= 0xC0 and length < (2 if first < 0xE0 else 3 if first < 0xF0 else 4)
    return False
