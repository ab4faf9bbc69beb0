"""What a step has to do besides its guesses. A value; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .base import Wish


@dataclass(slots=True)
class Load:
    num_rows: int  # that get a token
    num_prompt: int  # tokens computed besides those
    context: int  # tokens in the cache, over all rows

    @classmethod
    def of(cls, wishes: Sequence[Wish]) -> Load:
        num_rows = num_scheduled = context = 0
        for wish in wishes:
            request, scheduled = wish.request, wish.num_scheduled
            computed = request.num_computed_tokens
            num_rows += computed + scheduled == len(request.token_ids)  # Wish.samples, spelled out: once a row and step
            num_scheduled += scheduled
            context += computed
        return cls(num_rows, num_scheduled - num_rows, context)
