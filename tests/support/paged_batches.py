"""Batches of prompts, chains and trees over blocks of a cache, for tests of whatever computes them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from foretoken.engine.runner import ancestors
from foretoken.kernels.layout import RaggedBatch

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Row:
    """start tokens are in the cache; then causal tokens, then a tree: (token, parent), parents before children, -1 = the last causal."""

    causal: list[int]
    start: int
    blocks: Sequence[int]
    tree: Sequence[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


def batch_of(rows: Sequence[Row], block_size: int = BLOCK_SIZE, padding: int = 0) -> RaggedBatch:
    """One pass over all rows, with whole logits of all their tokens. padding: tokens of no row behind them."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    masks: list[int] = []
    ends = [0]
    for row in rows:
        first_tree = row.start + len(row.causal)
        depths, ancestry = ancestors([parent for _, parent in row.tree])
        token_ids += [*row.causal, *(token for token, _ in row.tree)]
        positions += [*range(row.start, first_tree), *(first_tree + depth for depth in depths)]
        places = range(row.start, first_tree + len(row.tree))
        slots += [row.blocks[place // block_size] * block_size + place % block_size for place in places]
        masks += [0] * len(row.causal) + [mask - (1 << 64) if mask >> 63 else mask for mask in ancestry]  # node 63 is the sign
        ends.append(len(token_ids))
    width = max((len(row.blocks) for row in rows), default=1)
    tables = [[*row.blocks, *[0] * (width - len(row.blocks))] for row in rows]
    return RaggedBatch(
        token_ids=torch.tensor(token_ids + [0] * padding, dtype=torch.int64),
        positions=torch.tensor(positions + [0] * padding, dtype=torch.int64),
        slot_mapping=torch.tensor(slots + [-1] * padding, dtype=torch.int64),
        query_start_loc=torch.tensor(ends, dtype=torch.int32),
        seq_lens=torch.tensor([row.start + len(row.causal) + len(row.tree) for row in rows], dtype=torch.int32),
        block_tables=torch.tensor(tables, dtype=torch.int32).view(len(rows), width),
        num_causal=torch.tensor([len(row.causal) for row in rows], dtype=torch.int32),
        tree_mask=torch.tensor(masks + [0] * padding, dtype=torch.int64),
        logits_indices=torch.arange(len(token_ids)),
        full_logits=torch.arange(len(token_ids)),
        block_size=block_size,
    )


def assert_same_batch(found: Any, expected: Any) -> None:
    """Field by field, also of a batch within. Tensors may lie elsewhere, in one piece."""
    for name in (part.name for part in fields(expected)):
        value, right = getattr(found, name), getattr(expected, name)
        if isinstance(right, RaggedBatch):
            assert_same_batch(value, right)
        elif isinstance(right, torch.Tensor):
            assert value.dtype == right.dtype and value.cpu().tolist() == right.tolist() and value.is_contiguous(), name
        else:
            assert value == right, name
