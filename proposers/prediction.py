"""Predicted Outputs: a request may bring the text it expects, and the draft is what that text says next.

Owns one cursor into the prediction per request. A prediction that is wrong somewhere is found again behind the change.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from .base import Draft, DraftContext, Feedback, Needs
from .config import PredictionConfig

_RESYNC_SIZES = (8, 4, 2)  # tokens of output looked for in the prediction after a divergence, longest first


class PredictionProposer:
    """Follows the prediction while the output agrees with it; falls silent where it does not.

    The cursor starts at the prediction's beginning. When the output leaves the prediction, the last 8, 4 or 2 output tokens
    are looked for in it: the first place after the cursor wins, then the last one before it, so insertions, deletions and
    replacements cost a few tokens each. Rows without a prediction get nothing.
    """

    name = "prediction"
    needs = Needs()

    def __init__(self, config: PredictionConfig) -> None:
        self.max_tokens = config.num_speculative_tokens
        self._cursors: dict[str, _Cursor] = {}

    def propose(self, context: DraftContext) -> Draft:
        guesses: list[Sequence[int]] = []
        for row in context.rows:
            if not row.prediction:
                guesses.append(())
                continue
            cursor = self._cursors.get(row.request_id)
            if cursor is None:
                cursor = self._cursors[row.request_id] = _Cursor(row.prediction, row.num_prompt_tokens)
            cursor.follow(row.token_ids)
            guesses.append(cursor.upcoming(min(row.ceiling, self.max_tokens)))
        return Draft.chains(guesses)

    def observe(self, feedback: Feedback) -> None:
        pass

    def forget(self, request_id: str) -> None:
        self._cursors.pop(request_id, None)

    def check(self) -> None:
        for cursor in self._cursors.values():
            cursor.check()


class _Cursor:
    """Where in its prediction one request is."""

    __slots__ = ("_ends", "_followed", "_lost", "_next", "_num_prompt", "_prediction")

    def __init__(self, prediction: Sequence[int], num_prompt_tokens: int) -> None:
        self._prediction = tuple(prediction)
        self._num_prompt = num_prompt_tokens
        self._followed = num_prompt_tokens  # tokens of the request seen so far
        self._next = 0  # the prediction's token that should come next; while lost, where it was left
        self._lost = False
        self._ends: dict[tuple[int, ...], list[int]] | None = None  # n-gram -> where it ends, ascending; made when first lost

    def follow(self, token_ids: Sequence[int]) -> None:
        """Move along with the output tokens that have come since the last call."""
        for i in range(self._followed, len(token_ids)):
            if not self._lost and self._next < len(self._prediction) and token_ids[i] == self._prediction[self._next]:
                self._next += 1
            else:
                self._find_again(token_ids[max(self._num_prompt, i + 1 - _RESYNC_SIZES[0]) : i + 1])
        self._followed = len(token_ids)

    def upcoming(self, num_tokens: int) -> Sequence[int]:
        return () if self._lost else self._prediction[self._next : self._next + num_tokens]

    def _find_again(self, recent: Sequence[int]) -> None:
        if self._ends is None:
            self._ends = _ends_of_ngrams(self._prediction)
        self._lost = True
        for n in _RESYNC_SIZES:
            ends = self._ends.get(tuple(recent[-n:])) if n <= len(recent) else None
            if ends:
                ahead = bisect_left(ends, self._next + 1)
                self._next = ends[ahead] if ahead < len(ends) else ends[-1]
                self._lost = False
                return

    def check(self) -> None:
        assert 0 <= self._next <= len(self._prediction), "the cursor is outside its prediction"
        assert self._followed >= self._num_prompt, "a prompt token was taken for output"


def _ends_of_ngrams(tokens: tuple[int, ...]) -> dict[tuple[int, ...], list[int]]:
    ends: dict[tuple[int, ...], list[int]] = {}
    for n in _RESYNC_SIZES:
        for end in range(n, len(tokens) + 1):
            ends.setdefault(tokens[end - n : end], []).append(end)
    return ends
