"""Runs the target on a GPU without letting it wait: the next step is handed over before anybody has seen this one's result.

A step that the next one can be told from (every row decodes, greedily, and nobody guesses) is followed at once by a pass over
the same rows one token on, whose tokens never leave the device. When the core then plans just that step, its result is on the
way already; when it plans another one (a request came, ended or was stopped), what was begun is dropped. It wrote uncommitted
places only, and everything that comes later on the device comes after it. So nothing else in the engine knows of this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..kernels.layout import Executor, ForwardOutput, KVTensors, RaggedBatch
from .plan import PlanRow, StepPlan
from .request import Request
from .runner import Runner, ragged_batch


class Started(Protocol):
    """A pass that was handed over (kernels/graphs.py)."""

    @property
    def argmax(self) -> Tensor: ...

    def finish(self) -> ForwardOutput: ...


class StartingExecutor(Executor, Protocol):
    """An executor that need not be waited for (kernels/graphs.py)."""

    def start(
        self,
        batch: RaggedBatch,
        kv: KVTensors,
        hidden: tuple[int, ...] = (),
        inputs: Mapping[str, Tensor] | None = None,
        tokens: Tensor | None = None,
    ) -> Started: ...


@dataclass(frozen=True, slots=True)
class _Expected:
    """One row of the step that was begun."""

    request: Request
    node: int  # of the step before: its argmax is this row's token
    place: int
    block_table: tuple[int, ...]

    def is_in(self, row: PlanRow, token: int, block_size: int) -> bool:
        """Whether the plan's row is the one that was begun, with this token."""
        return (
            row.request is self.request
            and (row.num_computed, row.num_scheduled) == (self.place, 1)
            and row.samples
            and not row.draft_token_ids
            and row.request.token_ids[self.place] == token
            and tuple(row.block_table[: self.place // block_size + 1]) == self.block_table
        )


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A step that was begun before it was planned."""

    rows: dict[str, tuple[int, _Expected]]  # request id -> its index in the pass
    started: Started
    before: Started  # the step that its tokens come from


class OverlappedRunner(Runner):
    """A `Runner` whose steps overlap. What it computes is what the runner would."""

    lookahead = 1  # places to keep reserved behind each row, so that the next step's are known

    def __init__(
        self,
        executor: StartingExecutor,
        kv: KVTensors,
        hidden: tuple[int, ...],
        wants_full_logits: Callable[[Request], bool],
        max_model_len: int,
    ) -> None:
        super().__init__(executor, kv, hidden, wants_full_logits)
        self._starting = executor
        self._max_model_len = max_model_len
        self._ahead: _Ahead | None = None
        self._was_steady = False  # the step before: one alone says little about the next
        self.num_ahead = 0  # steps that were begun before they were planned
        self.num_used = 0  # those that were then planned

    def forward(self, plan: StepPlan) -> ForwardOutput:
        ahead, self._ahead = self._ahead, None
        taken = None if ahead is None else self._taken(ahead, plan)
        if ahead is not None and taken is not None:
            self.num_used += 1
            self._ahead = self._begin(plan, ahead.started, taken)
            return _rows(ahead.started.finish(), taken)
        started = self._starting.start(ragged_batch(plan, self._wants_full_logits), self.kv, self._hidden)
        self._ahead = self._begin(plan, started, range(len(plan.rows)))
        return started.finish()

    def final_states(self, plan: StepPlan) -> Tensor:
        self._ahead = None  # the step behind it would read its tokens where this pass writes its own
        return super().final_states(plan)

    def _taken(self, ahead: _Ahead, plan: StepPlan) -> list[int] | None:
        """Which rows of the pass that was begun are the plan's, in its order; None if the plan has others."""
        if plan.scored:
            return None
        tokens = ahead.before.finish().argmax  # long here: the step before has been committed
        taken: list[int] = []
        for row in plan.rows:
            index, expected = ahead.rows.get(row.request.request_id, (0, None))
            if expected is None or self._wants_full_logits(row.request):
                return None
            if not expected.is_in(row, int(tokens[expected.node]), plan.block_size):
                return None
            taken.append(index)
        return taken

    def _begin(self, plan: StepPlan, started: Started, nodes_of_rows: Sequence[int]) -> _Ahead | None:
        """Hand over the step behind this one, if it can be told what that will be. nodes_of_rows: where each row's argmax stands."""
        was_steady, self._was_steady = self._was_steady, plan.is_steady
        expected = self._expected(plan, nodes_of_rows) if was_steady else []
        if not expected:
            return None
        batch = _decode_batch(expected, plan.block_size)
        nodes = [row.node for row in expected]
        tokens = started.argmax[: len(nodes)] if nodes == list(range(len(nodes))) else started.argmax[_index(nodes, started.argmax)]
        self.num_ahead += 1
        following = self._starting.start(batch, self.kv, self._hidden, tokens=tokens)
        return _Ahead({row.request.request_id: (i, row) for i, row in enumerate(expected)}, following, started)

    def _expected(self, plan: StepPlan, nodes_of_rows: Sequence[int]) -> list[_Expected]:
        """The rows of the next step; none if that is open."""
        if not plan.is_steady or plan.scored:
            return []
        rows: list[_Expected] = []
        for node, row in zip(nodes_of_rows, plan.rows, strict=True):
            request, place = row.request, row.num_computed + row.num_scheduled
            if not row.samples or row.draft_token_ids or self._wants_full_logits(request):
                return []
            if request.num_output_tokens + 1 >= request.max_tokens or place + 1 >= self._max_model_len:
                continue  # this step is its last
            blocks = place // plan.block_size + 1
            if blocks > len(row.block_table):
                return []
            rows.append(_Expected(request, node, place, tuple(row.block_table[:blocks])))
        return rows


def _decode_batch(rows: list[_Expected], block_size: int) -> RaggedBatch:
    """One token for each row, which the device fills in."""
    count = len(rows)
    every = list(range(count))
    return RaggedBatch.of_lists(
        token_ids=[0] * count,
        positions=[row.place for row in rows],
        slots=[row.block_table[-1] * block_size + row.place % block_size for row in rows],
        tree_mask=[0] * count,
        logits_indices=every,
        full_logits=[],
        query_start_loc=[*every, count],
        seq_lens=[row.place + 1 for row in rows],
        num_causal=[1] * count,
        tables=[row.block_table for row in rows],
        block_size=block_size,
    )


def _rows(output: ForwardOutput, taken: list[int]) -> ForwardOutput:
    """These rows of a pass of one token each."""
    if taken == list(range(len(output.argmax))):
        return output
    index = torch.tensor(taken, dtype=torch.int64)
    hidden: Mapping[int, Tensor] = output.hidden
    states = {boundary: state[_index(taken, state)] for boundary, state in hidden.items()}
    return ForwardOutput(output.argmax[index], output.top[index], None, states)


def _index(values: list[int], like: Tensor) -> Tensor:
    """On the device of another tensor, without waiting for it."""
    index = torch.tensor(values, dtype=torch.int64)
    return index.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else index
