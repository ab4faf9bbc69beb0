"""Drafters without a cache: heads that guess from the target's state of one position, the last whose tokens are committed.

Owns that state of each request. Knows no heads: how they guess from states and last tokens is their own business.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..kernels.batch_lists import BatchMemory
from ..kernels.layout import FINAL, Executor, ForwardOutput, RaggedBatch
from ..kernels.started import Started, StartingExecutor
from ..kernels.upload import upload
from .base import Draft, DraftContext, Feedback, Needs
from .drafting import Feed
from .features import WHOLE_STEP
from .guessing import FEATURE, Guesses, single_tokens


class RowNetwork:
    """A network from states, and perhaps token ids, to scores or states: rows know nothing of each other."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._kv = executor.allocate(1, 16)  # it has no layers that would write there
        self._has_logits = executor.vocab_size > 0
        self._starting = executor if isinstance(executor, StartingExecutor) else None
        self._batches = BatchMemory()

    def run(self, states: Tensor, token_ids: Sequence[int] | None = None, boundaries: tuple[int, ...] = ()) -> ForwardOutput:
        """states [R, width] and token ids [R] -> logits [R, V], if it has any, and the states that are asked for, where it computes."""
        return self.executor.run(self._batch(states, token_ids), self._kv, boundaries, {FEATURE: states.float().contiguous()})

    def logits(self, states: Tensor) -> Tensor:
        """[R, V] float32, where it computes. Not waited for if the executor need not be."""
        logits = self._started(states).logits
        assert logits is not None
        return logits

    def final(self, states: Tensor, token_ids: Sequence[int] | None = None) -> Tensor:
        """[R, width of FINAL] of a network without scores, as `logits`."""
        return self._started(states, token_ids, (FINAL,)).hidden[FINAL]

    def _started(
        self, states: Tensor, token_ids: Sequence[int] | None = None, boundaries: tuple[int, ...] = ()
    ) -> ForwardOutput | Started:
        if self._starting is None:
            return self.run(states, token_ids, boundaries)
        return self._starting.start(self._batch(states, token_ids), self._kv, boundaries, inputs={FEATURE: states.float().contiguous()})

    def _batch(self, states: Tensor, token_ids: Sequence[int] | None) -> RaggedBatch:
        return self._batches.batch(single_tokens([0] * states.shape[0] if token_ids is None else token_ids, self._has_logits))


class Heads(Protocol):
    """Runs the heads of one step over all rows that want guesses, at least one."""

    def guess(self, feeds: Sequence[Feed], states: Tensor) -> Guesses:
        """states [R, H]: of each feed's last committed position, after the target's final norm. Every count is at least 1."""
        ...


class LastStateProposer:
    """Implements `Proposer`. A row guesses if the state that its last known token was chosen from is here.

    So does every row that decodes; one that reads its prompt, or has just come back from preemption, has no such state yet.
    Heads know no positions, so there is no length that they cannot read.
    """

    needs = Needs(hidden=(FINAL,))

    def __init__(self, name: str, max_tokens: int, heads: Heads) -> None:
        self.name = name
        self.max_tokens = max_tokens
        self._heads = heads
        self._states: dict[str, tuple[int, Tensor, int]] = {}  # request -> position, states [T, H] of a step, and its own row of them

    def propose(self, context: DraftContext) -> Draft:
        feeds: list[Feed] = []
        states: list[Tensor] = []
        for index, row in enumerate(context.rows):
            length, count = len(row.token_ids), min(row.ceiling, self.max_tokens)
            known = self._states.get(row.request_id)
            if count > 0 and known is not None and known[0] == length - 2:
                feeds.append(Feed(index, row, length, length, count))
                states.append(known[1][known[2]])
        if not feeds:
            return Draft.empty(len(context.rows))
        stacked = torch.stack(states).float()
        sound: list[bool] = stacked.isfinite().all(-1).tolist()
        if not all(sound):  # one of them would spoil the whole batch's guesses, not only its own row's
            stacked = stacked[upload(torch.tensor(sound), stacked.device)]
            feeds = [feed for feed, is_sound in zip(feeds, sound, strict=True) if is_sound]
            if not feeds:
                return Draft.empty(len(context.rows))
        return self._heads.guess(feeds, stacked).draft(feeds, len(context.rows))

    def observe(self, feedback: Feedback) -> None:
        """Take the state of each row's last accepted node, or of its last known token if nothing was accepted."""
        if FINAL not in feedback.hidden:
            return
        rows = [i for i, finished in enumerate(feedback.finished) if not finished]
        nodes = [feedback.accepted[i][-1] if feedback.accepted[i] else -1 for i in rows]  # -1 = the last known token
        places = [feedback.query_start_loc[i] + feedback.num_scheduled[i] + node for i, node in zip(rows, nodes, strict=True)]
        states = feedback.hidden[FINAL]
        # Most are never read, so a step's states, which are its own, stay as they are, unless they are many.
        if rows and states.shape[0] > WHOLE_STEP * len(feedback.request_ids):
            states, places = states[upload(torch.tensor(places), states.device)], [*range(len(rows))]
        for i, place in zip(rows, places, strict=True):
            self._states[feedback.request_ids[i]] = feedback.num_committed[i] - 1, states, place

    def forget(self, request_id: str) -> None:
        self._states.pop(request_id, None)

    def check(self) -> None:
        for position, states, place in self._states.values():
            assert position >= 0 and 0 <= place < states.shape[0], "a state of no position, or none"

    def close(self) -> None:
        """Nothing outlives the process."""
