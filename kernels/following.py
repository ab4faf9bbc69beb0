"""The pass behind a step whose end the host has not seen, laid out on the device: each row's newest token, and the guesses behind it.

How many tokens each row is fed is known before; which they are and where they stand says matching.py's answer, and the guesses are
those that a device has just made behind the same answer. `laid_out` is the reference of triton/following.py, which does it in one
launch. Knows no drafter and no request.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from .batch_lists import packed_tables
from .layout import RaggedBatch
from .record import record
from .upload import upload_packed


@record
class Follower:
    """One row of the pass, on the host. `length`: its tokens known before the step, whose last is the root of its draft."""

    answer: int  # its row of matching's answer
    length: int
    chain: int  # its row of the guesses
    count: int  # guesses that it is fed
    table: array[int]  # blocks of every place that it may come to stand on
    draws: bool  # whether whole rows of scores are wanted behind its tokens
    adapter: int = 0  # as in RaggedBatch


@dataclass(frozen=True)
class Followers:
    """R rows of T tokens, on the device."""

    values: Tensor  # [R, 5] int32: answer, length, chain, count, first flat token
    tables: Tensor  # [R, B] int32
    starts: Tensor  # [R + 1] int32
    sizes: Tensor  # [R] int32
    every: Tensor  # [T] int64, 0, 1, ...
    full_logits: Tensor  # as in RaggedBatch
    block_size: int
    vocab_size: int  # ids that can be read; others become some that can be, and nobody uses what follows
    adapters: Tensor | None = None  # as in RaggedBatch

    @classmethod
    def of(cls, rows: Sequence[Follower], device: torch.device, block_size: int, vocab_size: int) -> Followers:
        """Under way there: one copy."""
        width = max(len(row.table) for row in rows)
        starts = [*accumulate((1 + row.count for row in rows), initial=0)]
        values = [[row.answer, row.length, row.chain, row.count, start] for row, start in zip(rows, starts, strict=False)]
        tables = np.frombuffer(packed_tables([row.table for row in rows], width), np.int32).reshape(-1, width)
        drawn = [node for row, start in zip(rows, starts, strict=False) if row.draws for node in range(start, start + 1 + row.count)]
        parts = upload_packed(
            [
                np.array(values, np.int32),
                tables.copy(),
                np.array(starts, np.int32),
                np.array([1 + row.count for row in rows], np.int32),
                np.arange(starts[-1]),
                np.array(drawn, np.int64),
                np.array([row.adapter for row in rows], np.int32),
            ],
            device,
        )
        numbers, moved_tables, moved_starts, sizes, every, full_logits, adapters = parts
        has_adapters = any(row.adapter for row in rows)
        return cls(
            numbers, moved_tables, moved_starts, sizes, every, full_logits, block_size, vocab_size, adapters if has_adapters else None
        )

    def batch(self, token_ids: Tensor, positions: Tensor, slots: Tensor, seq_lens: Tensor, tree_mask: Tensor) -> RaggedBatch:
        """With what only the device knows. Scores are wanted everywhere."""
        return RaggedBatch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slots,
            query_start_loc=self.starts,
            seq_lens=seq_lens,
            block_tables=self.tables,
            num_causal=self.sizes,
            tree_mask=tree_mask,
            logits_indices=self.every,
            full_logits=self.full_logits,
            block_size=self.block_size,
            adapters=self.adapters,
        )


def following(followers: Followers, answer: Tensor, guesses: Tensor | None) -> RaggedBatch:
    """answer: of matching, on its device; guesses [N, K], None if no row has any. A row that emits nothing goes on as if it had emitted
    its first token: it has failed."""
    if answer.is_cuda:
        from .triton import following  # Triton is there only where torch is built for GPUs

        return following.laid_out(followers, answer, guesses)
    return laid_out(followers, answer, guesses)


def laid_out(followers: Followers, answer: Tensor, guesses: Tensor | None) -> RaggedBatch:
    """The reference."""
    answers, lengths, chains, _, starts = followers.values.long().unbind(1)
    accepted = (answer[answers, 0].long() - 1).clamp(min=0)
    newest = lengths + accepted  # the place of the token that nobody has guessed
    owner = torch.searchsorted(followers.starts[1:].long(), followers.every, right=True)
    nth = followers.every - starts[owner]
    positions = newest[owner] + nth
    tokens = answer[answers[owner], 1 + accepted[owner]].long()
    if guesses is not None:
        tokens = torch.where(nth > 0, guesses[chains[owner], (nth - 1).clamp(min=0)], tokens)
    size = followers.block_size
    slots = followers.tables[owner, positions // size].long() * size + positions % size
    seq_lens = (newest + followers.sizes).int()
    return followers.batch(tokens.clamp(0, followers.vocab_size - 1), positions, slots, seq_lens, torch.zeros_like(slots))
