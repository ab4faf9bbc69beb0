"""Where chains go on behind a step whose end the host has not seen: the ragged batch that it would make then, made on the device.

A row emits what matching.py's answer says, so how much a drafter has still to read, and where, is known there first. All sizes are
the largest that there can be; behind what is really read stands padding. `laid_out` is the reference of triton/continuation.py, which
does it in one launch. Knows no drafter and no request.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .batch_lists import packed_tables
from .layout import RaggedBatch
from .record import record
from .upload import upload_packed


@record
class Continuation:
    """One row that goes on, on the host. `length`: its tokens known before the step, whose last is the root of its draft."""

    answer: int  # its row of matching's answer
    length: int
    num_drafted: int  # the draft is a chain of so many
    num_held: int  # entries of so many of these are in place, and good if they are accepted
    node: int  # of the root among all tokens of the step
    table: array[int]  # blocks of at least length + num_drafted + 1 places
    first: int  # as in RaggedBatch.first_places
    count: int  # tokens that its chain is to have, at least 1

    @property
    def most_read(self) -> int:
        """Tokens whose entries are made, at most."""
        return self.num_drafted + 1 - min(self.num_drafted, self.num_held)

    def read(self, num_accepted: int) -> tuple[int, int]:
        """Positions start:stop that are read if so many guesses are accepted."""
        return self.length + min(num_accepted, self.num_held), self.length + num_accepted + 1

    def room(self, num_accepted: int, block_size: int, max_model_len: int) -> int:
        """Tokens that its chain has then: the last one is not fed, so it needs no place."""
        stop = self.length + num_accepted + 1
        return min(self.count, len(self.table) * block_size - stop + 1, max_model_len - stop)


@dataclass(frozen=True)
class Ways:
    """R rows that go on, on the device."""

    values: Tensor  # [R, 7] int32: answer, length, num_held, node, first, count, places of its table
    tables: Tensor  # [R, B] int32
    num_tokens: int  # T, the sum of most_read
    has_firsts: bool
    block_size: int
    vocab_size: int  # ids that can be read; others become some that can be, and nobody uses what follows
    max_model_len: int  # positions there are, more than any row has with its draft

    @classmethod
    def of(cls, rows: Sequence[Continuation], device: torch.device, block_size: int, vocab_size: int, max_model_len: int) -> Ways:
        """Under way there: one copy."""
        width = max(len(row.table) for row in rows)
        values = [[r.answer, r.length, r.num_held, r.node, r.first, r.count, len(r.table) * block_size] for r in rows]
        tables = np.frombuffer(packed_tables([row.table for row in rows], width), np.int32).reshape(-1, width)
        moved = upload_packed([np.array(values, np.int32), tables.copy()], device)
        num_tokens, has_firsts = sum(row.most_read for row in rows), any(row.first for row in rows)
        return cls(moved[0], moved[1], num_tokens, has_firsts, block_size, vocab_size, max_model_len)


@dataclass(frozen=True)
class Continued:
    """Of R rows, on the device: one chain each."""

    batch: RaggedBatch  # T tokens; scores wanted behind each row
    nodes: Tensor  # [T] int64, the token of the step behind which each entry's own token was chosen
    said: Tensor  # [R, 1 + depth] int32: how many tokens each row emits, and which
    num_accepted: Tensor  # [R] int64
    counts: Tensor  # [R] int64, `room` of each


def continued(ways: Ways, answer: Tensor) -> Continued:
    """answer: of matching, on its device. A row that emits nothing goes on as if it had emitted its first token: it has failed."""
    if answer.is_cuda:
        from .triton import continuation  # Triton is there only where torch is built for GPUs

        return continuation.laid_out(ways, answer)
    return laid_out(ways, answer)


def laid_out(ways: Ways, answer: Tensor) -> Continued:
    """The reference."""
    places, lengths, held, roots, firsts, wanted, num_places = ways.values.long().unbind(1)
    depth, block_size = answer.shape[1] // 2, ways.block_size
    said = answer[places, : 1 + depth]
    accepted = (said[:, 0].long() - 1).clamp(min=0)
    starts = lengths + torch.minimum(accepted, held)
    stops = lengths + accepted + 1
    ends = (stops - starts).cumsum(0)

    # Flat tokens: which row each is of, and which of the emitted ones.
    flat = torch.arange(ways.num_tokens, device=answer.device)
    owner = torch.searchsorted(ends, flat, right=True).clamp(max=len(places) - 1)
    is_read = flat < ends[-1]
    position = torch.where(is_read, starts[owner] + flat - (ends - stops + starts)[owner], lengths[owner])
    nth = position - lengths[owner]
    tokens = said[owner, 1 + nth].long().clamp(0, ways.vocab_size - 1)
    slots = ways.tables[owner, position // block_size].long() * block_size + position % block_size
    query_start_loc = torch.cat([ends.new_zeros(1), ends]).int()
    batch = RaggedBatch(
        token_ids=tokens,
        positions=position,
        slot_mapping=torch.where(is_read, slots, -1),
        query_start_loc=query_start_loc,
        seq_lens=stops.int(),
        block_tables=ways.tables,
        num_causal=query_start_loc.diff(),
        tree_mask=torch.zeros_like(flat),
        logits_indices=ends - 1,
        full_logits=flat[:0],
        block_size=block_size,
        first_places=firsts.int() if ways.has_firsts else None,
    )
    counts = torch.minimum(wanted, torch.minimum(num_places - stops + 1, ways.max_model_len - stops))
    return Continued(batch, roots[owner] + nth, said, accepted, counts)
