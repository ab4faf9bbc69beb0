"""Guesses that mean nothing and cost nothing, for measuring: how many of them count as accepted is decided elsewhere."""

import torch

from ..kernels.upload import upload
from .base import ChainsAhead, Draft, DraftContext, Feedback, Needs, UnderWay
from .config import SyntheticConfig


class SyntheticProposer:
    """Guesses the token p modulo the vocabulary for position p, for every row that may guess."""

    needs = Needs(hears="nothing")

    def __init__(self, config: SyntheticConfig, name: str, vocab_size: int, begins_ahead: bool = False) -> None:
        """begins_ahead: steps are begun before the one before them has ended."""
        self.name = name
        self.max_tokens = config.num_speculative_tokens
        self.num_places_ahead = 2 * self.max_tokens + 1 if begins_ahead else 0
        self._vocab_size = vocab_size
        self._asked: dict[str, int] = {}

    def propose(self, context: DraftContext) -> Draft:
        lengths = [(len(row.token_ids), min(row.ceiling, self.max_tokens)) for row in context.rows]
        self._asked = {row.request_id: count for row, (_, count) in zip(context.rows, lengths, strict=True) if count}
        return Draft.chains([[p % self._vocab_size for p in range(length, length + count)] for length, count in lengths])

    def begin(self, step: UnderWay) -> ChainsAhead | None:
        rows = [row for row in step.rows if row.request_id in self._asked]
        if not rows:
            return None
        known = torch.tensor([[row.answer, len(row.token_ids)] for row in rows], dtype=torch.int64)
        answers, lengths = upload(known, step.answer.device).unbind(1)
        first = lengths + step.answer[answers, 0].clamp(min=1)
        tokens = (first[:, None] + torch.arange(self.max_tokens, device=first.device)) % self._vocab_size
        return ChainsAhead({row.request_id: (place, self._asked[row.request_id]) for place, row in enumerate(rows)}, tokens)

    def observe(self, feedback: Feedback) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass

    def check(self) -> None:
        """There is no state."""

    def close(self) -> None:
        """Nothing outlives the process."""
