"""Turns a step plan into a ragged batch and runs the target on it. Knows no queue and no sampling rule."""

from collections.abc import Callable, Mapping
from dataclasses import field

import torch

from ..kernels.batch_lists import BatchLists, BatchMemory
from ..kernels.layout import FINAL, Executor, ForwardOutput, KVTensors, RaggedBatch
from ..kernels.record import record
from ..proposers.base import ChainsAhead
from .cache_size import StateShare
from .plan import PlanRow, StepPlan, slot_of
from .request import Request
from .verifier import Verifier


@record
class Forward:
    """A pass over a plan, which may still be under way."""

    finish: Callable[[], ForwardOutput]  # waits for the result
    answer: torch.Tensor | None = None  # what the rows emit, on the device, if that is known there before the host knows it
    hidden: Mapping[int, torch.Tensor] = field(default_factory=dict)  # boundary id -> [T, H] there


class Runner:
    """Owner of the target's executor and its cache tensors."""

    lookahead = 0  # places behind each row's tokens that it wants reserved

    @property
    def has_begun(self) -> bool:
        """Whether it computes the next step already, as if nothing changed: any other would come behind that one."""
        return False

    def __init__(
        self,
        executor: Executor,
        kv: KVTensors,
        hidden: tuple[int, ...],
        wants_full_logits: Callable[[Request], bool],
        states: StateShare | None = None,
    ) -> None:
        """states: what kv has room for, of a recurrent target."""
        self.executor = executor
        self.kv = kv
        self.states = states
        self._hidden = hidden  # boundary ids that proposers need
        self._wants_full_logits = wants_full_logits
        self._batches = BatchMemory()

    def forward(self, plan: StepPlan) -> ForwardOutput:
        """Waits for the result."""
        return self.start(plan).finish()

    def start(self, plan: StepPlan) -> Forward:
        """Hands the pass over."""
        output = self.executor.run(self._batch(plan), self.kv, self._hidden)
        return Forward(lambda: output)

    def begin_next(self, plan: StepPlan, answer: torch.Tensor, chains: ChainsAhead | None) -> None:
        """Hand over the step behind this one, if it is foreseeable. answer: what this one, which is under way, says. chains: guesses that
        were begun for the next."""

    def drop_begun(self) -> None:
        """Somebody else has run the target: what it computes already of the next step stands no more."""

    def final_states(self, plan: StepPlan) -> torch.Tensor:
        """[T, H] the target's states behind its final norm, for all T tokens of the plan, whose rows do not sample."""
        return self.executor.run(self._batch(plan), self.kv, (FINAL,)).hidden[FINAL].cpu()

    def use_verifier(self, verifier: Verifier) -> None:
        """Whose answer to expect, for runners that need a request's choice before the verifier does."""

    def move_slots(self, src: list[int], dst: list[int]) -> None:
        self.kv.move(torch.tensor(src, dtype=torch.int64), torch.tensor(dst, dtype=torch.int64))

    def _batch(self, plan: StepPlan) -> RaggedBatch:
        return self._batches.batch(batch_lists(plan, self._wants_full_logits))


def batch_lists(plan: StepPlan, wants_full_logits: Callable[[Request], bool]) -> BatchLists:
    """The plan's rows, flat. Drafts that are chains are causal tokens, others tree tokens."""
    lists = BatchLists(plan.block_size)
    token_ids, wanted = lists.token_ids, lists.logits_indices
    for row in plan.rows:
        start, scheduled, draft = row.num_computed, row.num_scheduled, row.draft_token_ids
        known, end = start + scheduled, start + scheduled + len(draft)
        token_ids += row.request.token_ids[start:known]
        root = len(token_ids) - 1
        token_ids += draft
        lists.add_slots(row.block_table, start, end)
        if not draft or row.is_chain:
            lists.positions += range(start, end)
            lists.tree_mask += [0] * (end - start)
            lists.num_causal.append(end - start)
        else:
            depths, masks = ancestors(row.parents)
            lists.positions += [*range(start, known), *(known + depth for depth in depths)]
            lists.tree_mask += [0] * scheduled + [_as_int64(mask) for mask in masks]
            lists.num_causal.append(scheduled)
        lists.query_start_loc.append(len(token_ids))
        lists.seq_lens.append(end)
        lists.tables.append(row.block_table)
        if row.samples:
            if wants_full_logits(row.request):
                lists.full_logits += range(len(wanted), len(wanted) + 1 + len(draft))
            wanted += range(root, root + 1 + len(draft))
    if plan.rows[0].state is not None:
        lists.states = [_state(row) for row in plan.rows]
    if any([row.request.adapter is not None for row in plan.rows]):
        lists.adapters = [slot_of(row.request) for row in plan.rows]
    for part in plan.scored:
        first = lists.query_start_loc[part.row] + part.offset
        lists.full_logits += range(len(wanted), len(wanted) + len(part.token_ids))
        wanted += range(first, first + len(part.token_ids))
    return lists


def _state(row: PlanRow) -> tuple[int, int, int, int, int, int]:
    """As BatchLists has it."""
    state = row.state
    assert state is not None, "every row of a recurrent target has a state"
    return state.source, state.target, _as_int64(state.accepted), row.num_scheduled, state.copy_place, state.copy_slot


def _as_int64(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


def ancestors(parents: list[int]) -> tuple[list[int], list[int]]:
    """Depth below the root's children (0 = child of the root) and bit mask of ancestors and self, for each tree node.

    parents [-1, 0, 0] -> depths [0, 1, 1], masks [0b001, 0b011, 0b101]
    """
    depths: list[int] = []
    masks: list[int] = []
    for node, parent in enumerate(parents):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        masks.append(1 << node | (0 if parent < 0 else masks[parent]))
    return depths, masks
