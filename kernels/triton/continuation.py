"""Where chains go on, laid out on a GPU behind the walk that says it: kernels/continuation.py in one launch, and no wait.

A program does one row, and the last one the padding. Where a row begins is the sum of what those before it read, which each program
adds up for itself: they are few.
"""

from __future__ import annotations

from array import array

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..continuation import Continuation, Continued, Ways
from ..layout import RaggedBatch

_VALUES = tl.constexpr(7)  # of each row: answer, length, num_held, node, first, count, places of its table
_LANES = 128
_EVEN = 16  # numbers: what lies behind so many is aligned as Triton likes it


def laid_out(ways: Ways, answer: Tensor) -> Continued:
    """As the reference, on the device of answer."""
    device, depth = answer.device, answer.shape[1] // 2
    num_rows, width = ways.tables.shape
    by_token = torch.empty(5, _even(ways.num_tokens), dtype=torch.int64, device=device)
    by_row = torch.empty(3, _even(num_rows), dtype=torch.int64, device=device)
    narrow = torch.empty(4, _even(num_rows + 1), dtype=torch.int32, device=device)
    said = torch.empty(num_rows, 1 + depth, dtype=torch.int32, device=device)
    _lay_out[(num_rows + 1,)](
        ways.values, ways.tables, answer, by_token, by_row, narrow, said, num_rows, ways.num_tokens, width, depth, by_token.shape[1],
        by_row.shape[1], narrow.shape[1], ways.block_size, ways.vocab_size, ways.max_model_len, LANES=_LANES, num_warps=1,
    )
    tokens, positions, slots, tree_mask, nodes = by_token[:, : ways.num_tokens]
    last, accepted, counts = by_row[:, :num_rows]
    starts, lengths, num_causal, firsts = narrow
    batch = RaggedBatch(
        token_ids=tokens,
        positions=positions,
        slot_mapping=slots,
        query_start_loc=starts[: num_rows + 1],
        seq_lens=lengths[:num_rows],
        block_tables=ways.tables,
        num_causal=num_causal[:num_rows],
        tree_mask=tree_mask,
        logits_indices=last,
        full_logits=last[:0],
        block_size=ways.block_size,
        first_places=firsts[:num_rows] if ways.has_firsts else None,
    )
    return Continued(batch, nodes, said, accepted, counts)


def warm_up(device: torch.device) -> None:
    """Have it compiled now, so that no request waits for it."""
    ways = Ways.of([Continuation(0, 1, 1, 0, 0, array("i", (0,)), 0, 1)], device, 16, 2, 8)
    laid_out(ways, torch.ones(1, 5, dtype=torch.int32, device=device))


def _even(count: int) -> int:
    return triton.cdiv(count, _EVEN) * _EVEN


@triton.jit(
    do_not_specialize=[
        "num_rows", "num_tokens", "width", "depth", "token_stride", "row_stride", "narrow_stride", "block_size", "vocab_size",
        "max_model_len",
    ]
)
def _lay_out(
    values_ptr, tables_ptr, answer_ptr, by_token_ptr, by_row_ptr, narrow_ptr, said_ptr, num_rows, num_tokens, width, depth, token_stride,
    row_stride, narrow_stride, block_size, vocab_size, max_model_len, LANES: tl.constexpr,
):
    program = tl.program_id(0)
    is_padding = program == num_rows
    row = tl.minimum(program, num_rows - 1)
    lane = tl.arange(0, LANES)
    begin = tl.full((), 0, tl.int32)
    for base in range(0, program, LANES):
        other = base + lane
        before = other < program
        its_answer = tl.load(values_ptr + other * _VALUES, mask=before, other=0)
        its_held = tl.load(values_ptr + other * _VALUES + 2, mask=before, other=0)
        its_accepted = tl.maximum(tl.load(answer_ptr + its_answer * (1 + 2 * depth), mask=before, other=0) - 1, 0)
        begin += tl.sum(tl.where(before, its_accepted + 1 - tl.minimum(its_accepted, its_held), 0), 0)

    answer = answer_ptr + tl.load(values_ptr + row * _VALUES) * (1 + 2 * depth)
    length = tl.load(values_ptr + row * _VALUES + 1)
    root = tl.load(values_ptr + row * _VALUES + 3)
    accepted = tl.maximum(tl.load(answer) - 1, 0)
    skipped = tl.minimum(accepted, tl.load(values_ptr + row * _VALUES + 2))
    end = tl.where(is_padding, num_tokens, begin + accepted + 1 - skipped)
    for base in range(begin, end, LANES):
        flat = base + lane
        inside = flat < end
        nth = tl.where(is_padding, 0, skipped + flat - begin)
        position = length + nth
        token = tl.load(answer + 1 + nth, mask=inside, other=0)
        block = tl.load(tables_ptr + row * width + position // block_size, mask=inside, other=0).to(tl.int64)
        slot = tl.where(is_padding, -1, block * block_size + position % block_size)
        out = by_token_ptr + flat
        tl.store(out, tl.minimum(tl.maximum(token, 0), vocab_size - 1).to(tl.int64), mask=inside)
        tl.store(out + token_stride, position.to(tl.int64), mask=inside)
        tl.store(out + 2 * token_stride, slot, mask=inside)
        tl.store(out + 3 * token_stride, tl.zeros_like(slot), mask=inside)
        tl.store(out + 4 * token_stride, (root + nth).to(tl.int64), mask=inside)

    if is_padding:
        tl.store(narrow_ptr, 0)
    else:
        stop = length + accepted + 1
        wanted = tl.load(values_ptr + row * _VALUES + 5)
        room = tl.minimum(tl.load(values_ptr + row * _VALUES + 6) - stop + 1, max_model_len - stop)
        tl.store(by_row_ptr + row, (end - 1).to(tl.int64))
        tl.store(by_row_ptr + row_stride + row, accepted.to(tl.int64))
        tl.store(by_row_ptr + 2 * row_stride + row, tl.minimum(wanted, room).to(tl.int64))
        tl.store(narrow_ptr + row + 1, end)
        tl.store(narrow_ptr + narrow_stride + row, stop)
        tl.store(narrow_ptr + 2 * narrow_stride + row, end - begin)
        tl.store(narrow_ptr + 3 * narrow_stride + row, tl.load(values_ptr + row * _VALUES + 4))
        for base in range(0, 1 + depth, LANES):
            nth = base + lane
            tl.store(said_ptr + row * (1 + depth) + nth, tl.load(answer + nth, mask=nth <= depth, other=0), mask=nth <= depth)
