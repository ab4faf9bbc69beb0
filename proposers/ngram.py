"""Prompt lookup: the longest recent n-gram that occurred before says what comes next. No weights, no target state.

Owns one n-gram index per request, extended by new tokens only. Knows no other request.
"""

from __future__ import annotations

from collections.abc import Sequence

from .base import Draft, DraftContext, Feedback, Needs
from .config import NgramConfig

_TOKEN_BITS = 32


class NgramProposer:
    """Prompt lookup decoding (Saxena 2023) with vLLM's choice among matches.

    The longest n in [prompt_lookup_min, prompt_lookup_max] whose last n tokens occurred earlier wins; among its earlier
    occurrences the earliest, or the latest by option. They may overlap the end of the text. The draft is what followed.
    A row costs a few dictionary lookups per new token and n, whatever the length of its context; a request's index holds
    at most one entry per token and n.
    """

    needs = Needs()

    def __init__(self, config: NgramConfig, name: str = "ngram") -> None:
        self.name = name
        self.max_tokens = config.num_speculative_tokens
        self._sizes = range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1)
        self._latest = config.match == "latest"
        self._indices: dict[str, _NgramIndex] = {}

    def propose(self, context: DraftContext) -> Draft:
        guesses: list[Sequence[int]] = []
        for row in context.rows:
            index = self._indices.get(row.request_id)
            if index is None:
                index = self._indices[row.request_id] = _NgramIndex(self._sizes, self._latest)
            index.extend(row.token_ids)
            begin = index.match_end
            guesses.append(row.token_ids[begin : begin + min(row.ceiling, self.max_tokens)] if begin else ())
        return Draft.chains(guesses)

    def observe(self, feedback: Feedback) -> None:
        pass

    def forget(self, request_id: str) -> None:
        self._indices.pop(request_id, None)

    def check(self) -> None:
        for index in self._indices.values():
            index.check()


class _NgramIndex:
    """Where each n-gram of one growing text ends: first or last, for every n at once."""

    __slots__ = ("_ends", "_key", "_latest", "_num_tokens", "match_end")

    def __init__(self, sizes: Sequence[int], latest: bool) -> None:
        """sizes: descending."""
        # An n-gram is one integer, the newest token lowest: a rolling key, exact, made without touching earlier tokens.
        self._ends: list[tuple[int, int, dict[int, int]]] = [(n, (1 << _TOKEN_BITS * n) - 1, {}) for n in sizes]
        self._key = 0
        self._latest = latest
        self._num_tokens = 0
        self.match_end = 0  # end of the best earlier occurrence of the text's last tokens; 0 = none

    def extend(self, token_ids: Sequence[int]) -> None:
        """Index the tokens that have come since the last call."""
        longest = self._ends[0][1]
        for end, token in enumerate(token_ids[self._num_tokens :], self._num_tokens + 1):
            self._key = (self._key << _TOKEN_BITS | token) & longest
            self.match_end = 0
            for n, mask, ends in self._ends:
                if n <= end:
                    key = self._key & mask
                    earlier = ends.get(key, 0)
                    self.match_end = self.match_end or earlier
                    if not earlier or self._latest:
                        ends[key] = end
        self._num_tokens = len(token_ids)

    def check(self) -> None:
        assert 0 <= self.match_end < max(self._num_tokens, 1), "a match must end before the text does"
        for n, _, ends in self._ends:
            assert len(ends) <= max(self._num_tokens - n + 1, 0), "more n-grams than the text has places"
            assert all(n <= end <= self._num_tokens for end in ends.values()), "an n-gram ends outside the text"
