"""Batches over one growing cache, for tests of anything that runs a decoder."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from foretoken.kernels.layout import Executor, ForwardOutput, KVTensors, RaggedBatch

BLOCK_SIZE = 4


def ragged(rows: list[tuple[list[int], int, list[int]]], all_logits: bool = True) -> RaggedBatch:
    """rows: (new token ids, tokens already in the cache, block ids). Causal tokens only; logits of all or of last tokens."""
    token_ids, positions, slots, ends = [], [], [], [0]
    for new, start, blocks in rows:
        token_ids += new
        positions += range(start, start + len(new))
        slots += [blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, start + len(new))]
        ends.append(len(token_ids))
    width = max(len(blocks) for _, _, blocks in rows)
    logits_indices = list(range(len(token_ids))) if all_logits else [end - 1 for end in ends[1:]]
    return RaggedBatch(
        token_ids=torch.tensor(token_ids),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        query_start_loc=torch.tensor(ends, dtype=torch.int32),
        seq_lens=torch.tensor([start + len(new) for new, start, _ in rows], dtype=torch.int32),
        block_tables=torch.tensor([blocks + [0] * (width - len(blocks)) for _, _, blocks in rows], dtype=torch.int32),
        num_causal=torch.tensor([len(new) for new, _, _ in rows], dtype=torch.int32),
        tree_mask=torch.zeros(len(token_ids), dtype=torch.int64),
        logits_indices=torch.tensor(logits_indices),
        full_logits=torch.arange(len(logits_indices)),
        block_size=BLOCK_SIZE,
    )


@dataclass
class Decoding:
    """Rows of one executor; row r owns every num_rows-th block, so that no row's blocks are contiguous."""

    executor: Executor
    num_rows: int = 1
    max_len: int = 64
    kv: KVTensors = field(init=False)
    lengths: list[int] = field(init=False)

    def __post_init__(self) -> None:
        blocks = -(-self.max_len // BLOCK_SIZE)
        self.kv = self.executor.allocate(self.num_rows * blocks, BLOCK_SIZE)
        self.lengths = [0] * self.num_rows

    def batch(self, tokens: list[list[int]], all_logits: bool = True) -> RaggedBatch:
        blocks = range(-(-self.max_len // BLOCK_SIZE))
        return ragged(
            [(new, self.lengths[r], [b * self.num_rows + r for b in blocks]) for r, new in enumerate(tokens)], all_logits
        )

    def feed(self, tokens: list[list[int]], hidden: tuple[int, ...] = ()) -> ForwardOutput:
        """One pass over some new tokens of each row, with logits of all of them."""
        output = self.executor.run(self.batch(tokens), self.kv, hidden)
        self.lengths = [length + len(new) for length, new in zip(self.lengths, tokens, strict=True)]
        return output
