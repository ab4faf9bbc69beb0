"""Guesses that mean nothing and cost nothing, for measuring: how many of them count as accepted is decided elsewhere."""

from __future__ import annotations

from .base import Draft, DraftContext, Feedback, Needs
from .config import SyntheticConfig


class SyntheticProposer:
    """Guesses the token p modulo the vocabulary for position p, for every row that may guess."""

    needs = Needs(hears="nothing")

    def __init__(self, config: SyntheticConfig, name: str, vocab_size: int) -> None:
        self.name = name
        self.max_tokens = config.num_speculative_tokens
        self._vocab_size = vocab_size

    def propose(self, context: DraftContext) -> Draft:
        lengths = [(len(row.token_ids), min(row.ceiling, self.max_tokens)) for row in context.rows]
        return Draft.chains([[p % self._vocab_size for p in range(length, length + count)] for length, count in lengths])

    def observe(self, feedback: Feedback) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass

    def check(self) -> None:
        """There is no state."""

    def close(self) -> None:
        """Nothing outlives the process."""
