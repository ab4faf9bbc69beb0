"""Guesses of the target itself, read as other weights or other tokens make it: one pass over its own cache, and no state.

What the pass writes are uncommitted places, which the target's next pass writes over. Knows neither those weights nor those tokens.
"""

from collections.abc import Callable, Sequence

from ..kernels.layout import Executor, KVTensors, RaggedBatch
from .base import Draft, DraftContext, Feedback, Needs
from .drafting import Feed
from .guessing import Drawing, pick


class TargetProposer:
    """Implements `Proposer`. A row is guessed for once all but its last known token are in the target's cache."""

    needs = Needs(hears="nothing", runs_target=True)

    def __init__(
        self,
        name: str,
        max_tokens: int,
        executor: Executor,
        kv: KVTensors,
        batch: Callable[[Sequence[Feed], int], RaggedBatch],
        drawing: Drawing,
    ) -> None:
        """batch: (at least one feed, block size) -> a pass over each one's last known token and what stands for its guesses."""
        self.name = name
        self.max_tokens = max_tokens
        self._executor = executor
        self._kv = kv
        self._batch = batch
        self._drawing = drawing

    def propose(self, context: DraftContext) -> Draft:
        feeds = self._feeds(context)
        if not feeds:
            return Draft.empty(len(context.rows))
        logits = self._executor.run(self._batch(feeds, context.block_size), self._kv).logits
        return pick(feeds, logits, self._drawing, self._executor.token_ids).draft(feeds, len(context.rows))

    def observe(self, feedback: Feedback) -> None:
        """What became of guesses changes none."""

    def forget(self, request_id: str) -> None:
        """There is nothing."""

    def check(self) -> None:
        """There is nothing."""

    def close(self) -> None:
        """Nothing outlives the process."""

    def _feeds(self, context: DraftContext) -> list[Feed]:
        """The last known token of every row of which all before it is in the target's cache."""
        feeds: list[Feed] = []
        for index, row in enumerate(context.rows):
            length = len(row.token_ids)
            if row.ceiling and row.num_computed == length - 1 and row.computed_after == length:
                feeds.append(Feed(index, row, length - 1, length, min(row.ceiling, self.max_tokens)))
        return feeds
