"""Batches of any rows over blocks dealt at random, for tests of attention."""

import torch
from paged_batches import Row, batch_of

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


def ragged(
    rows: list[tuple[int, int, list[int]]],
    generator: torch.Generator,
    padded_to: int = 0,
    in_order: bool = False,
    block_size: int = BLOCK_SIZE,
) -> RaggedBatch:
    """Rows of (context, causal tokens, parents of the tree). Blocks are dealt at random, or in order."""
    deck = (torch.arange(NUM_BLOCKS) if in_order else torch.randperm(NUM_BLOCKS, generator=generator)).tolist()
    dealt: list[Row] = []
    for context, causal, parents in rows:
        num_blocks = -(-(context + causal + len(parents)) // block_size)
        blocks, deck = deck[:num_blocks], deck[num_blocks:]
        dealt.append(Row([0] * causal, context, blocks, [(0, parent) for parent in parents]))
    num_tokens = sum(causal + len(parents) for _, causal, parents in rows)
    return batch_of(dealt, block_size, padding=max(0, padded_to - num_tokens))
