"""Batches of any rows over blocks dealt at random, for tests of attention."""

from __future__ import annotations

import torch

from foretoken.kernels.layout import RaggedBatch

BLOCK_SIZE = 4
NUM_BLOCKS = 600

# (context, causal tokens, parents of the tree) of each row
BATCHES: dict[str, list[tuple[int, int, list[int]]]] = {
    "decode": [(17, 1, [])],
    "prefill": [(0, 40, [])],
    "long prefill": [(0, 150, [])],
    "later chunk": [(37, 140, [])],
    "chain": [(50, 6, [])],
    "tree": [(21, 1, [-1, -1, 0, 0, 1, 3])],
    "tree of 64": [(9, 1, [-1, *range(0, 62), 5])],
    "tree without causal tokens": [(13, 0, [-1, 0, -1])],
    "long prompt with a tree": [(5, 126, [-1, 0, 0, 1, 2])],
    "no rows": [],
    "empty rows": [(0, 0, []), (8, 1, []), (5, 0, [])],
    "equal decodes": [(11, 1, [])] * 5,
    "mixed": [(3, 1, []), (200, 4, []), (0, 33, []), (90, 1, [-1, -1, 0]), (170, 1, []), (1, 2, [-1, 0, 1, 1]), (0, 1, []), (64, 1, [])],
}


def ancestors(parents: list[int]) -> list[int]:
    """[-1, 0, 0] -> [0b1, 0b11, 0b101]"""
    masks: list[int] = []
    for node, parent in enumerate(parents):
        masks.append(1 << node | (masks[parent] if parent >= 0 else 0))
    return [mask - (1 << 64) if mask >> 63 else mask for mask in masks]


def ragged(
    rows: list[tuple[int, int, list[int]]],
    generator: torch.Generator,
    padded_to: int = 0,
    in_order: bool = False,
    block_size: int = BLOCK_SIZE,
) -> RaggedBatch:
    """Rows of (context, causal tokens, parents of the tree). Blocks are dealt at random, or in order."""
    deck = torch.arange(NUM_BLOCKS) if in_order else torch.randperm(NUM_BLOCKS, generator=generator)
    tables = torch.zeros(len(rows), 1 + max(((c + n + len(p)) // block_size for c, n, p in rows), default=0), dtype=torch.int32)
    positions: list[int] = []
    slots: list[int] = []
    masks: list[int] = []
    starts = [0]
    dealt = 0
    for row, (context, causal, parents) in enumerate(rows):
        seq_len = context + causal + len(parents)
        num_blocks = -(-seq_len // block_size)
        tables[row, :num_blocks] = deck[dealt : dealt + num_blocks].int()
        dealt += num_blocks
        slots += [int(tables[row, p // block_size]) * block_size + p % block_size for p in range(context, seq_len)]
        positions += range(context, context + causal)
        depths: list[int] = []
        for parent in parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        positions += [context + causal + depth for depth in depths]
        masks += [0] * causal + ancestors(parents)
        starts.append(len(slots))
    padding = max(0, padded_to - len(slots))
    num_tokens = len(slots) + padding
    return RaggedBatch(
        token_ids=torch.zeros(num_tokens, dtype=torch.int64),
        positions=torch.tensor(positions + [0] * padding, dtype=torch.int64),
        slot_mapping=torch.tensor(slots + [-1] * padding, dtype=torch.int64),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor([c + n + len(p) for c, n, p in rows], dtype=torch.int32),
        block_tables=tables,
        num_causal=torch.tensor([n for _, n, _ in rows], dtype=torch.int32),
        tree_mask=torch.tensor(masks + [0] * padding, dtype=torch.int64),
        logits_indices=torch.arange(0),
        full_logits=torch.arange(0),
        block_size=block_size,
    )
