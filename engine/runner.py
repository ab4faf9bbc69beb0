"""Turns a step plan into a ragged batch and runs the target on it. Knows no queue and no sampling rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ..kernels.layout import FINAL, Executor, ForwardOutput, KVTensors, RaggedBatch, tensors_of_lists
from .plan import StepPlan
from .request import Request
from .sampler import Sampler


@dataclass(frozen=True)
class InFlight:
    """A forward pass that was started. On a CPU it is done already; a GPU may still be at work."""

    output: ForwardOutput


class Runner:
    """Owner of the target's executor and its cache tensors."""

    lookahead = 0  # places behind each row's tokens that it wants reserved

    def __init__(
        self, executor: Executor, kv: KVTensors, hidden: tuple[int, ...], wants_full_logits: Callable[[Request], bool]
    ) -> None:
        self.executor = executor
        self.kv = kv
        self._hidden = hidden  # boundary ids that proposers need
        self._wants_full_logits = wants_full_logits

    def forward(self, plan: StepPlan) -> ForwardOutput:
        return self.finish(self.start(plan))

    def start(self, plan: StepPlan) -> InFlight:
        """Needs no accepted length on the host beyond what the plan says."""
        return InFlight(self.executor.run(ragged_batch(plan, self._wants_full_logits), self.kv, self._hidden))

    def finish(self, in_flight: InFlight) -> ForwardOutput:
        return in_flight.output

    def final_states(self, plan: StepPlan) -> torch.Tensor:
        """[T, H] the target's states behind its final norm, for all T tokens of the plan, whose rows do not sample."""
        return self.executor.run(ragged_batch(plan, self._wants_full_logits), self.kv, (FINAL,)).hidden[FINAL].cpu()

    def use_sampler(self, sampler: Sampler) -> None:
        """The verifier's, for runners that need a request's choice before the verifier does."""

    def move_slots(self, src: list[int], dst: list[int]) -> None:
        self.kv.move(*tensors_of_lists(np.int64, src, dst))


def ragged_batch(plan: StepPlan, wants_full_logits: Callable[[Request], bool]) -> RaggedBatch:
    """The plan's rows as flat arrays. Drafts that are chains are causal tokens, others tree tokens."""
    size = plan.block_size
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    tree_mask: list[int] = []
    logits_indices: list[int] = []
    full_logits: list[int] = []
    query_start_loc = [0]
    seq_lens: list[int] = []
    num_causal: list[int] = []
    for row in plan.rows:
        start, scheduled, draft, table = row.num_computed, row.num_scheduled, row.draft_token_ids, row.block_table
        known, end = start + scheduled, start + scheduled + len(draft)
        token_ids += row.request.token_ids[start:known]
        root = len(token_ids) - 1
        token_ids += draft
        slots += [table[place // size] * size + place % size for place in range(start, end)]
        if not draft or row.is_chain:
            positions += range(start, end)
            tree_mask += [0] * (end - start)
            num_causal.append(end - start)
        else:
            depths, masks = ancestors(row.parents)
            positions += [*range(start, known), *(known + depth for depth in depths)]
            tree_mask += [0] * scheduled + [mask - (1 << 64) if mask >> 63 else mask for mask in masks]  # as int64
            num_causal.append(scheduled)
        query_start_loc.append(len(token_ids))
        seq_lens.append(end)
        if row.samples:
            if wants_full_logits(row.request):
                full_logits += range(len(logits_indices), len(logits_indices) + 1 + len(draft))
            logits_indices += range(root, root + 1 + len(draft))
    for part in plan.scored:
        first = query_start_loc[part.row] + part.offset
        full_logits += range(len(logits_indices), len(logits_indices) + len(part.token_ids))
        logits_indices += range(first, first + len(part.token_ids))

    return RaggedBatch.of_lists(
        token_ids,
        positions,
        slots,
        tree_mask,
        logits_indices,
        full_logits,
        query_start_loc,
        seq_lens,
        num_causal,
        [row.block_table for row in plan.rows],
        size,
    )


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
