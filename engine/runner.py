"""Turns a step plan into a ragged batch and runs the target on it. Knows no queue and no sampling rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..kernels.layout import Executor, ForwardOutput, KVTensors, RaggedBatch
from .plan import StepPlan
from .request import Request


@dataclass(frozen=True)
class InFlight:
    """A forward pass that was started. On a CPU it is done already; a GPU may still be at work."""

    output: ForwardOutput


class Runner:
    """Owner of the target's executor and its cache tensors."""

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

    def move_slots(self, src: list[int], dst: list[int]) -> None:
        self.kv.move(*_tensors(np.int64, src, dst))


def ragged_batch(plan: StepPlan, wants_full_logits: Callable[[Request], bool]) -> RaggedBatch:
    """The plan's rows as flat arrays. Drafts that are chains are causal tokens, others tree tokens.

    Lists, and one tensor made of all lists of a kind: after a pass that has read all weights every call into numpy or torch finds
    the caches empty, and costs several times what it does in a loop.
    """
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

    block_tables = np.zeros((len(plan.rows), max(len(row.block_table) for row in plan.rows)), np.int32)
    for index, row in enumerate(plan.rows):
        block_tables[index, : len(row.block_table)] = row.block_table
    wide = _tensors(np.int64, token_ids, positions, slots, tree_mask, logits_indices, full_logits)
    narrow = _tensors(np.int32, query_start_loc, seq_lens, num_causal)
    return RaggedBatch(
        token_ids=wide[0],
        positions=wide[1],
        slot_mapping=wide[2],
        query_start_loc=narrow[0],
        seq_lens=narrow[1],
        block_tables=torch.from_numpy(block_tables),
        num_causal=narrow[2],
        tree_mask=wide[3],
        logits_indices=wide[4],
        full_logits=wide[5],
        block_size=size,
    )


def _tensors(dtype: type[np.integer], *lists: list[int]) -> Sequence[torch.Tensor]:
    """One tensor for each list, all in one piece of memory."""
    everything = np.array([value for values in lists for value in values], dtype)
    return torch.from_numpy(everything).split([len(values) for values in lists])


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
