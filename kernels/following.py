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
from numpy.typing import NDArray
from torch import Tensor

from .batch_lists import packed_tables
from .host_memory import Said, host_memory
from .layout import RaggedBatch
from .record import record
from .started import Fetched


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
    """R rows of T tokens, on the host."""

    values: NDArray[np.int32]  # [7, R]: answer, length, chain, count, first flat token, adapter, first of its full_logits (-1 = none)
    tables: NDArray[np.int32]  # [R, B]
    num_tokens: int
    num_drawn: int  # entries of full_logits
    block_size: int
    vocab_size: int  # ids that can be read; others become some that can be, and nobody uses what follows

    @classmethod
    def of(cls, rows: Sequence[Follower], block_size: int, vocab_size: int) -> Followers:
        width = max(len(row.table) for row in rows)
        starts = [*accumulate((1 + row.count for row in rows), initial=0)]
        drawn = [*accumulate(((1 + row.count) * row.draws for row in rows), initial=0)]
        values = [
            [row.answer for row in rows],
            [row.length for row in rows],
            [row.chain for row in rows],
            [row.count for row in rows],
            starts[:-1],
            [row.adapter for row in rows],
            [first if row.draws else -1 for row, first in zip(rows, drawn, strict=False)],
        ]
        tables = np.frombuffer(packed_tables([row.table for row in rows], width), np.int32).reshape(-1, width)
        return cls(np.array(values, np.int32), tables, starts[-1], drawn[-1], block_size, vocab_size)

    @property
    def has_adapters(self) -> bool:
        return bool(self.values[5].any())


def following(followers: Followers, answer: Tensor, guesses: Tensor | None) -> tuple[RaggedBatch, Fetched | Said]:
    """The pass, on the device of answer, and [2, T] for the host: its token ids and its positions.

    answer: of matching; guesses [N, K], None if no row has any. A row that emits nothing goes on as if it had emitted its first token: it
    has failed.
    """
    if not answer.is_cuda:
        batch = laid_out(followers, answer, guesses)
        return batch, Fetched.of(torch.stack([batch.token_ids, batch.positions]))[0]
    from .triton import following  # Triton is there only where torch is built for GPUs

    slot = host_memory(answer.device).slot(2 * followers.num_tokens)
    batch = following.laid_out(followers, answer, guesses, slot.numbers)
    slot.sent()
    return batch, slot.said(2, followers.num_tokens)


def laid_out(followers: Followers, answer: Tensor, guesses: Tensor | None) -> RaggedBatch:
    """The reference."""
    narrow, tables = (torch.tensor(part, device=answer.device) for part in (followers.values, followers.tables))
    answers, lengths, chains, counts, starts, _, drawn = narrow.long()
    accepted = (answer[answers, 0].long() - 1).clamp(min=0)
    newest = lengths + accepted  # the place of the token that nobody has guessed
    flat = torch.arange(followers.num_tokens, device=answer.device)
    owner = torch.searchsorted(starts + counts, flat)
    nth = flat - starts[owner]
    positions = newest[owner] + nth
    tokens = answer[answers[owner], 1 + accepted[owner]].long()
    if guesses is not None:
        tokens = torch.where(nth > 0, guesses[chains[owner], (nth - 1).clamp(min=0)], tokens)
    size = followers.block_size
    return RaggedBatch(
        token_ids=tokens.clamp(0, followers.vocab_size - 1),
        positions=positions,
        slot_mapping=tables[owner, positions // size].long() * size + positions % size,
        query_start_loc=torch.cat([narrow[4], narrow.new_full((1,), followers.num_tokens)]),
        seq_lens=(newest + counts + 1).int(),
        block_tables=tables,
        num_causal=narrow[3] + 1,
        tree_mask=torch.zeros_like(flat),
        logits_indices=flat,  # scores are wanted everywhere
        full_logits=flat[drawn[owner] >= 0],
        block_size=size,
        adapters=narrow[5] if followers.has_adapters else None,
    )
