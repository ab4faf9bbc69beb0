"""Predicted Outputs: a request may bring the text it expects, and the draft is what that text says next.

Owns one cursor into the prediction per request. A prediction that is wrong somewhere is found again behind the change.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .base import Draft, DraftContext, Feedback, KnownRow, Needs
from .config import PredictionConfig

_RESYNC_SIZES = (8, 4, 2)  # tokens of output looked for in the prediction after a divergence, longest first
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that no token is lost from a hash modulo 2^64


class PredictionProposer:
    """Follows the prediction while the output agrees with it; falls silent where it does not.

    The cursor starts at the prediction's beginning. When the output leaves the prediction, the last 8, 4 or 2 output tokens
    are looked for in it: the first place after the cursor wins, then the last one before it, so insertions, deletions and
    replacements cost a few tokens each. Rows without a prediction get nothing.
    """

    name = "prediction"
    needs = Needs(hears="nothing")

    def __init__(self, config: PredictionConfig) -> None:
        self.max_tokens = config.num_speculative_tokens
        self._cursors: dict[str, _Cursor] = {}

    def propose(self, context: DraftContext) -> Draft:
        guesses: list[Sequence[int]] = []
        for row in context.rows:
            if not row.prediction:
                guesses.append(())
                continue
            guesses.append(self._cursor(row).upcoming(min(row.ceiling, self.max_tokens)))
        return Draft.chains(guesses)

    def has_guess(self, row: KnownRow) -> bool:
        return bool(row.prediction) and self._cursor(row).has_upcoming

    def observe(self, feedback: Feedback) -> None:
        pass

    def forget(self, request_id: str) -> None:
        self._cursors.pop(request_id, None)

    def check(self) -> None:
        for cursor in self._cursors.values():
            cursor.check()

    def close(self) -> None:
        """Nothing outlives the process."""

    def _cursor(self, row: KnownRow) -> _Cursor:
        """Behind all that is known of the row."""
        cursor = self._cursors.get(row.request_id)
        if cursor is None:
            cursor = self._cursors[row.request_id] = _Cursor(row.prediction, row.num_prompt_tokens)
        cursor.follow(row.token_ids)
        return cursor


class _Cursor:
    """Where in its prediction one request is."""

    __slots__ = ("_followed", "_index", "_lost", "_next", "_num_prompt", "_prediction")

    def __init__(self, prediction: Sequence[int], num_prompt_tokens: int) -> None:
        self._prediction = tuple(prediction)
        self._num_prompt = num_prompt_tokens
        self._followed = num_prompt_tokens  # tokens of the request seen so far
        self._next = 0  # the prediction's token that should come next; while lost, where it was left
        self._lost = False
        self._index: _NgramIndex | None = None  # of the prediction, made when first lost

    def follow(self, token_ids: Sequence[int]) -> None:
        """Move along with the output tokens that have come since the last call."""
        for i in range(self._followed, len(token_ids)):
            if not self._lost and self._next < len(self._prediction) and token_ids[i] == self._prediction[self._next]:
                self._next += 1
            else:
                self._find_again(token_ids[max(self._num_prompt, i + 1 - _RESYNC_SIZES[0]) : i + 1])
        self._followed = len(token_ids)

    @property
    def has_upcoming(self) -> bool:
        return not self._lost and self._next < len(self._prediction)

    def upcoming(self, num_tokens: int) -> Sequence[int]:
        return () if self._lost else self._prediction[self._next : self._next + num_tokens]

    def _find_again(self, recent: Sequence[int]) -> None:
        if self._index is None:
            self._index = _NgramIndex(self._prediction)
        found = self._index.find(recent, self._next)
        self._lost = found is None
        self._next = self._next if found is None else found

    def check(self) -> None:
        assert 0 <= self._next <= len(self._prediction), "the cursor is outside its prediction"
        assert self._followed >= self._num_prompt, "a prompt token was taken for output"


class _NgramIndex:
    """Where the n-grams of a fixed text end. Hashes sorted by numpy: thousands of tokens in a millisecond or two."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self._tokens = tokens
        values = np.array(tokens, dtype=np.uint64)
        self._sorted: list[tuple[int, np.ndarray, np.ndarray]] = []  # n, hashes ascending, ends (ascending where hashes are equal)
        for n in _RESYNC_SIZES:
            if n <= len(tokens):
                hashes = np.zeros(len(tokens) - n + 1, dtype=np.uint64)
                for i in range(n):
                    hashes = hashes * np.uint64(_MULTIPLIER) + values[i : len(tokens) - n + 1 + i]
                order = hashes.argsort(kind="stable")
                self._sorted.append((n, hashes[order], order + n))

    def find(self, recent: Sequence[int], after: int) -> int | None:
        """End of the longest n-gram that `recent` ends with: the first end past `after`, else the last one; None = nowhere."""
        for n, hashes, ends in self._sorted:
            if n > len(recent):
                continue
            key = 0
            for token in recent[-n:]:
                key = (key * _MULTIPLIER + token) % 2**64
            low, high = hashes.searchsorted(np.uint64(key), "left"), hashes.searchsorted(np.uint64(key), "right")
            if low < high:
                end = int(ends[min(low + ends[low:high].searchsorted(after, "right"), high - 1)])
                if self._tokens[end - n : end] == tuple(recent[-n:]):  # else two n-grams share a hash
                    return end
        return None
