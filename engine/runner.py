"""Turns a step plan into a ragged batch and runs the target on it. Knows no queue and no sampling rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ..kernels.layout import Executor, ForwardOutput, KVTensors, RaggedBatch
from .plan import PlanRow, StepPlan
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
        self.kv.move(_tensor(src), _tensor(dst))


def ragged_batch(plan: StepPlan, wants_full_logits: Callable[[Request], bool]) -> RaggedBatch:
    """The plan's rows as flat arrays. Drafts that are chains are causal tokens, others tree tokens."""
    rows, size = plan.rows, plan.block_size
    num_rows = len(rows)
    token_ids: list[int] = []
    tree: list[tuple[int, PlanRow]] = []  # (flat index of its first draft token, row)
    num_new = np.empty(num_rows, np.int32)
    num_causal = np.empty(num_rows, np.int32)
    first_place = np.empty(num_rows, np.int64)
    logits_indices: list[int] = []
    full_logits: list[int] = []
    for index, row in enumerate(rows):
        start, scheduled, draft = row.num_computed, row.num_scheduled, row.draft_token_ids
        token_ids.extend(row.request.token_ids[start : start + scheduled])
        root = len(token_ids) - 1
        num_new[index] = num_causal[index] = scheduled + len(draft)
        first_place[index] = start
        if draft:
            token_ids.extend(draft)
            if not row.is_chain:
                num_causal[index] = scheduled
                tree.append((root + 1, row))
        if row.samples:
            if wants_full_logits(row.request):
                full_logits.extend(range(len(logits_indices), len(logits_indices) + 1 + len(draft)))
            logits_indices.extend(range(root, root + 1 + len(draft)))

    query_start_loc = np.zeros(num_rows + 1, np.int32)
    np.cumsum(num_new, out=query_start_loc[1:])
    block_tables = np.zeros((num_rows, max(len(row.block_table) for row in rows)), np.int32)
    for index, row in enumerate(rows):
        block_tables[index, : len(row.block_table)] = row.block_table
    # Place of each token in its row; the slot follows from the row's block table.
    row_of = np.repeat(np.arange(num_rows), num_new)
    places = np.arange(len(token_ids)) - query_start_loc[row_of] + first_place[row_of]
    slots = block_tables[row_of, places // size].astype(np.int64) * size + places % size
    positions, tree_mask = places, np.zeros(len(token_ids), np.int64)
    if tree:
        positions = places.copy()
        for flat, row in tree:
            depths, masks = ancestors(row.parents)
            known = row.num_computed + row.num_scheduled
            positions[flat : flat + len(depths)] = np.array(depths) + known
            tree_mask[flat : flat + len(masks)] = np.array(masks, np.uint64).view(np.int64)
    return RaggedBatch(
        token_ids=_tensor(token_ids),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.from_numpy(slots),
        query_start_loc=torch.from_numpy(query_start_loc),
        seq_lens=torch.from_numpy((first_place + num_new).astype(np.int32)),
        block_tables=torch.from_numpy(block_tables),
        num_causal=torch.from_numpy(num_causal),
        tree_mask=torch.from_numpy(tree_mask),
        logits_indices=_tensor(logits_indices),
        full_logits=_tensor(full_logits),
        block_size=size,
    )


def _tensor(values: list[int]) -> torch.Tensor:
    """int64; by way of numpy, which reads a list several times as fast as torch."""
    return torch.from_numpy(np.array(values, np.int64))


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
