"""Batches over blocks of 16 slots with prompts, chains and trees, for tests of the native executor."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from foretoken.kernels.layout import RaggedBatch

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Row:
    """start tokens are in the cache; then causal tokens, then a tree: (token, parent), parents before children, -1 = the last causal."""

    causal: list[int]
    start: int
    blocks: list[int]
    tree: list[tuple[int, int]] = field(default_factory=list)


def batch_of(rows: list[Row]) -> RaggedBatch:
    """One pass over all rows, with whole logits of all tokens."""
    token_ids, positions, slots, masks, ends = [], [], [], [], [0]
    for row in rows:
        first_tree = row.start + len(row.causal)
        ancestors: list[int] = []
        depths: list[int] = []
        for i, (_, parent) in enumerate(row.tree):
            ancestors.append((ancestors[parent] if parent >= 0 else 0) | 1 << i)
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        token_ids += [*row.causal, *(token for token, _ in row.tree)]
        positions += [*range(row.start, first_tree), *(first_tree + depth for depth in depths)]
        places = range(row.start, first_tree + len(row.tree))
        slots += [row.blocks[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for place in places]
        masks += [0] * len(row.causal) + [mask - (1 << 64) if mask >> 63 else mask for mask in ancestors]  # node 63 is the sign
        ends.append(len(token_ids))
    width = max((len(row.blocks) for row in rows), default=1)
    return RaggedBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        query_start_loc=torch.tensor(ends, dtype=torch.int32),
        seq_lens=torch.tensor([row.start + len(row.causal) + len(row.tree) for row in rows], dtype=torch.int32),
        block_tables=torch.tensor([row.blocks + [0] * (width - len(row.blocks)) for row in rows], dtype=torch.int32),
        num_causal=torch.tensor([len(row.causal) for row in rows], dtype=torch.int32),
        tree_mask=torch.tensor(masks, dtype=torch.int64),
        logits_indices=torch.arange(len(token_ids)),
        full_logits=torch.arange(len(token_ids)),
        block_size=BLOCK_SIZE,
    )
