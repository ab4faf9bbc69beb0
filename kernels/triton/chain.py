"""What stands between the passes of a chain on a GPU: one launch lays all of them out, and one for each picks the best tokens.

kernels/device_chain.py has the references. Where a chain goes does not depend on what it says, so its passes are laid out beforehand.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device_chain import Choosing
from ..layout import RaggedBatch
from ..torch_executor import Computed
from .early_launch import await_inputs, launch_options
from .launch import ceil_div, power_of_two

_LANES = 32  # steps, or rows, that a program looks at at once
_BLOCKS = 1024  # of a table, that a program copies
_COLUMNS = 2048  # of a row of scores, that a program reads
_EVEN = 16  # numbers: what lies behind so many is aligned as Triton likes it


def follow_ups(batch: RaggedBatch, counts: Tensor, steps: int, max_model_len: int, advance: int = 1) -> list[RaggedBatch]:
    """As the reference, on the device of the batch."""
    count, later, device = len(batch.logits_indices), steps - 1, counts.device
    width, stride = batch.block_tables.shape[1], _even(count + 1)
    wide = torch.empty(2 + 2 * later, stride, dtype=torch.int64, device=device)
    narrow = torch.empty(2 + 2 * later, stride, dtype=torch.int32, device=device)
    tables = torch.empty(count, width, dtype=torch.int32, device=device)
    if count:
        _lay_out[(count, ceil_div(width, _BLOCKS))](
            batch.query_start_loc, batch.logits_indices, batch.positions, batch.seq_lens, batch.block_tables, batch.first_places, counts,
            wide, narrow, tables, len(batch.seq_lens), count, later, width, batch.block_tables.stride(0), stride, batch.block_size,
            max_model_len, advance, LANES=_LANES, BLOCKS=_BLOCKS, num_warps=1, **launch_options(device),
        )
    every, zeros, positions, slots = wide[0, :count], wide[1, :count], wide[2 : 2 + later], wide[2 + later :]
    starts, ones, lengths, firsts = narrow[0, : count + 1], narrow[1, :count], narrow[2 : 2 + later], narrow[2 + later :]
    return [
        RaggedBatch(
            token_ids=every,
            positions=positions[step, :count],
            slot_mapping=slots[step, :count],
            query_start_loc=starts,
            seq_lens=lengths[step, :count],
            block_tables=tables,
            num_causal=ones,
            tree_mask=zeros,
            logits_indices=every,
            full_logits=every[:0],
            block_size=batch.block_size,
            first_places=None if batch.first_places is None else firsts[step, :count],
            scores_every_token=True,
        )
        for step in range(later)
    ]


class BestChoices:
    """The best token of each chain and how likely it is, in one launch a step. Implements `Choices`."""

    wants_best = False

    def __init__(self, choosing: Choosing, count: int, steps: int, device: torch.device) -> None:
        self._choosing, self._step, self._steps = choosing, 0, steps
        self._next = torch.empty(steps, _even(count), dtype=torch.int64, device=device)  # what the next passes read
        self._found = torch.empty(count, steps, dtype=torch.int64, device=device)
        self._confidence = torch.empty(count, steps, dtype=torch.float32, device=device)
        self._arrived = torch.zeros(count, dtype=torch.int32, device=device)  # all 0 between launches

    def add(self, computed: Computed) -> Tensor:
        scores, choosing = computed.logits, self._choosing
        assert scores is not None
        count, width = len(self._found), choosing.width or scores.shape[1]
        pieces = ceil_div(width, _COLUMNS)
        best = torch.empty(count, pieces, dtype=torch.int64, device=scores.device)
        total = torch.empty(count, pieces, dtype=torch.float32, device=scores.device)
        tokens = self._next[self._step, :count]
        if count:
            _choose[(count, pieces)](
                scores, choosing.barred, choosing.token_ids, best, total, self._arrived, tokens, self._found, self._confidence,
                width, scores.stride(0), self._step, self._steps, COLUMNS=_COLUMNS, PIECES_PAD=power_of_two(pieces), num_warps=4,
                **launch_options(scores.device),
            )
        self._step += 1
        return tokens

    def said(self) -> tuple[Tensor, Tensor]:
        return self._found, self._confidence


def _even(count: int) -> int:
    return ceil_div(count, _EVEN) * _EVEN


@triton.jit(do_not_specialize=["num_rows", "count", "later", "width", "table_stride", "stride", "block_size", "max_model_len", "advance"])
def _lay_out(
    query_start_ptr, starts_ptr, positions_ptr, seq_lens_ptr, tables_ptr, firsts_ptr, counts_ptr, wide_ptr, narrow_ptr, own_tables_ptr,
    num_rows, count, later, width, table_stride, stride, block_size, max_model_len, advance, LANES: tl.constexpr,
    BLOCKS: tl.constexpr, EARLY: tl.constexpr,
):
    """One chain: its entries of all later passes, and a piece of its row's table. wide: every token, no mask, then positions and
    slots of each pass; narrow: where rows begin, how many tokens are causal, then lengths and first places of each pass."""
    await_inputs(EARLY)
    chain = tl.program_id(0)
    piece = tl.program_id(1)
    lane = tl.arange(0, LANES)
    start = tl.load(starts_ptr + chain)
    row = tl.full((), -1, tl.int32)
    for base in range(0, num_rows + 1, LANES):
        other = base + lane
        begin = tl.load(query_start_ptr + other, mask=other <= num_rows, other=0)
        row += tl.sum(((other <= num_rows) & (begin <= start)).to(tl.int32), 0)
    row = tl.minimum(row, num_rows - 1)  # padding
    table = tables_ptr + row.to(tl.int64) * table_stride
    block = piece * BLOCKS + tl.arange(0, BLOCKS)
    tl.store(own_tables_ptr + chain.to(tl.int64) * width + block, tl.load(table + block, mask=block < width), mask=block < width)
    if piece == 0:
        tl.store(wide_ptr + chain, chain.to(tl.int64))
        tl.store(wide_ptr + stride + chain, tl.zeros_like(start))
        tl.store(narrow_ptr + chain + 1, chain + 1)
        tl.store(narrow_ptr + stride + chain, 1)
        if chain == 0:
            tl.store(narrow_ptr, 0)
        place = tl.load(seq_lens_ptr + row).to(tl.int64)  # of the first pass
        position = tl.load(positions_ptr + start)
        num_wanted = tl.load(counts_ptr + chain)
        first = tl.full((), 0, tl.int32)
        if firsts_ptr is not None:
            first = tl.load(firsts_ptr + row)
        for base in range(0, later, LANES):
            nth = base + lane
            inside = nth < later
            wanted = nth + 1 < num_wanted
            its_place = place + advance * (nth + 1) - 1
            its_block = tl.minimum(tl.maximum(its_place // block_size, 0), width - 1)
            slot = tl.load(table + its_block, mask=inside & wanted, other=0).to(tl.int64) * block_size + its_place % block_size
            its_wide = wide_ptr + (2 + nth) * stride + chain
            tl.store(its_wide, tl.minimum(position + advance * (nth + 1), max_model_len - 1), mask=inside)
            tl.store(its_wide + later * stride, tl.where(wanted, slot, -1), mask=inside)
            its_narrow = narrow_ptr + (2 + nth) * stride + chain
            tl.store(its_narrow, tl.where(wanted, its_place + 1, 1).to(tl.int32), mask=inside)
            tl.store(its_narrow + later * stride, tl.where(wanted, first, 0), mask=inside)


@triton.jit(do_not_specialize=["step", "steps"])
def _choose(
    scores_ptr, barred_ptr, names_ptr, best_ptr, total_ptr, arrived_ptr, tokens_ptr, found_ptr, confidence_ptr, width, stride, step,
    steps, COLUMNS: tl.constexpr, PIECES_PAD: tl.constexpr, EARLY: tl.constexpr,
):
    """A piece of one row: its best score with its column, and the sum of exp(score - best). Who comes last joins those of all pieces."""
    await_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    pieces = tl.num_programs(1)
    column = piece * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    x = tl.load(scores_ptr + row * stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    if barred_ptr is not None:
        x = tl.where(tl.load(barred_ptr + column, mask=inside, other=1) != 0, float("-inf"), x)
    best = tl.max(tl.where(inside, _ranked(x, column), -(2**63)), 0)
    total = tl.sum(tl.exp(x - _base(_score(best))), 0)
    at = row * pieces + piece
    tl.store(best_ptr + at, best)
    tl.store(total_ptr + at, total)
    tl.debug_barrier()  # all threads have stored before one of them says so
    arrived = tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel", scope="gpu")
    if arrived != pieces - 1:
        return
    tl.store(arrived_ptr + row, 0)
    other = tl.arange(0, PIECES_PAD)
    bests = tl.load(best_ptr + row * pieces + other, mask=other < pieces, other=-(2**63), cache_modifier=".cg")
    totals = tl.load(total_ptr + row * pieces + other, mask=other < pieces, other=0.0, cache_modifier=".cg")
    best = tl.max(bests, 0)
    top = _score(best)
    shares = tl.exp(_base(_score(bests)) - top)
    whole = tl.sum(tl.where(totals == 0.0, 0.0, totals * shares), 0)
    name = _column(best)
    if names_ptr is not None:
        name = tl.load(names_ptr + name)
    tl.store(tokens_ptr + row, name)
    tl.store(found_ptr + row * steps + step, name)
    tl.store(confidence_ptr + row * steps + step, tl.exp(top - top) / whole)  # NaN where the best is not finite


@triton.jit
def _ranked(x, column):
    """int64 that are ordered as the scores are, NaN above all; of equal ones the lower column is above."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # 0 and -0 are equal
    rank = tl.where(x != x, 2**31 - 1, bits ^ ((bits >> 31) & (2**31 - 1)))
    return (rank.to(tl.int64) << 32) | (2**31 - 1 - column).to(tl.int64)


@triton.jit
def _score(ranked):
    rank = (ranked >> 32).to(tl.int32)
    return (rank ^ ((rank >> 31) & (2**31 - 1))).to(tl.float32, bitcast=True)


@triton.jit
def _column(ranked):
    return 2**31 - 1 - (ranked & (2**32 - 1))


@triton.jit
def _base(best):
    """What scores are taken less of: of nothing but -inf the sum is to be 0."""
    return tl.where(best == float("-inf"), 0.0, best)
