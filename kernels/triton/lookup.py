"""Prompt lookup on a GPU behind the walk that says what a row has emitted: kernels/lookup.py in two launches, and no wait.

Programs of the first compare a row's last tokens with what stands before each place of a part of its text; the best place wins by one
number: first how many tokens are the same, then where. The second writes down what follows there.
"""

from __future__ import annotations

from array import array

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..lookup import Lookup, Lookups
from .launch import ceil_div

_PART = 1024  # places of a program
_LANES = 32
_PLACES = tl.constexpr(2**31)


def looked_up(rows: Lookups, texts: Tensor, answer: Tensor) -> Tensor:
    """As the reference, on the device of answer."""
    num_rows, width = rows.tables.shape
    depth = answer.shape[1] // 2
    best = torch.zeros(num_rows, dtype=torch.int64, device=answer.device)
    found = torch.empty(num_rows, rows.count, dtype=torch.int64, device=answer.device)
    parts = ceil_div(rows.most_known + depth, _PART)
    shared = rows.values, rows.tables, texts, answer, best, width, answer.shape[1], rows.block_size, int(rows.latest)
    _compare[(num_rows, parts)](*shared, rows.least, rows.most, PART=_PART, num_warps=4)
    _write[(num_rows,)](*shared, found, rows.count, LANES=_LANES, num_warps=1)
    return found


def warm_up(device: torch.device) -> None:
    """Have it compiled now, so that no request waits for it."""
    rows = Lookups.of([Lookup(0, 1, array("i", (0,)))], device, 16, (1, 1), False, 1)
    looked_up(rows, torch.zeros(16, dtype=torch.int32, device=device), torch.ones(1, 5, dtype=torch.int32, device=device))


@triton.jit
def _tokens_at(place, mask, length, table, texts_ptr, answer, block_size):
    """Of a row's text: the known tokens, then those that it has just emitted."""
    is_known = place < length
    block = tl.load(table + place // block_size, mask=mask & is_known, other=0).to(tl.int64)
    known = tl.load(texts_ptr + block * block_size + place % block_size, mask=mask & is_known, other=-1)
    return tl.where(is_known, known, tl.load(answer + 1 + place - length, mask=mask & (place >= length), other=-1))


@triton.jit(do_not_specialize=["width", "answer_stride", "block_size", "latest", "least", "most"])
def _compare(
    values_ptr, tables_ptr, texts_ptr, answer_ptr, best_ptr, width, answer_stride, block_size, latest, least, most, PART: tl.constexpr
):
    row = tl.program_id(0)
    length = tl.load(values_ptr + row * 2 + 1)
    answer = answer_ptr + tl.load(values_ptr + row * 2) * answer_stride
    table = tables_ptr + row * width
    end = length + tl.load(answer)
    stop = tl.program_id(1) * PART + tl.arange(0, PART)  # places behind the tokens that are compared
    is_same = stop < end
    count = tl.zeros((PART,), tl.int32)
    for n in range(1, most + 1):
        own = _tokens_at(end - n, end >= n, length, table, texts_ptr, answer, block_size)
        inside = is_same & (stop >= n)
        is_same = inside & (_tokens_at(stop - n, inside, length, table, texts_ptr, answer, block_size) == own)
        count += is_same.to(tl.int32)
    key = count.to(tl.int64) * _PLACES + tl.where(latest != 0, stop, _PLACES - 1 - stop)
    key = tl.max(tl.where(count >= least, key, 0), 0)
    if key > 0:
        tl.atomic_max(best_ptr + row, key)


@triton.jit(do_not_specialize=["width", "answer_stride", "block_size", "latest", "count"])
def _write(
    values_ptr, tables_ptr, texts_ptr, answer_ptr, best_ptr, width, answer_stride, block_size, latest, found_ptr, count, LANES: tl.constexpr
):
    row = tl.program_id(0)
    length = tl.load(values_ptr + row * 2 + 1)
    answer = answer_ptr + tl.load(values_ptr + row * 2) * answer_stride
    best = tl.load(best_ptr + row)
    place = best % _PLACES
    begin = tl.where(best > 0, tl.where(latest != 0, place, _PLACES - 1 - place), 0).to(tl.int32)
    end = tl.where(best > 0, length + tl.load(answer), 0)
    lane = tl.arange(0, LANES)
    for base in range(0, count, LANES):
        nth = base + lane
        inside = (nth < count) & (begin + nth < end)
        token = _tokens_at(begin + nth, inside, length, tables_ptr + row * width, texts_ptr, answer, block_size)
        tl.store(found_ptr + row * count + nth, tl.where(inside, token, 0).to(tl.int64), mask=nth < count)
