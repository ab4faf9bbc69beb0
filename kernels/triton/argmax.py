"""The greatest entry of each row of scores, with many programs to a row: a vocabulary is long and rows are few."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .early_launch import await_inputs, launch_options
from .launch import ceil_div, power_of_two

_CHUNK = 2048


def best_of_rows(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Greatest entry of each row of scores [n, V] and its column int64, the lowest among equals; NaN counts as greatest."""
    rows, width = scores.shape
    chunks = ceil_div(width, _CHUNK)
    values = torch.empty(rows, dtype=scores.dtype, device=scores.device)
    columns = torch.empty(rows, dtype=torch.int64, device=scores.device)
    if rows:
        some_values = torch.empty(rows, chunks, dtype=torch.float32, device=scores.device)
        some_columns = torch.empty(rows, chunks, dtype=torch.int64, device=scores.device)
        options = launch_options(scores.device)
        _best[(rows, chunks)](scores, None, some_values, some_columns, width, scores.stride(0), BLOCK=_CHUNK, num_warps=4, **options)
        _best[(rows, 1)](some_values, some_columns, values, columns, chunks, chunks, BLOCK=power_of_two(chunks), num_warps=1, **options)
    return values, columns


@triton.jit
def _best(scores_ptr, names_ptr, values_ptr, columns_ptr, width, stride, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Best of one chunk of a row. names: what the columns are called; None = their own numbers."""
    await_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(scores_ptr + row * stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    is_nan = x != x
    has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    best = tl.max(tl.where(is_nan, float("-inf"), x), 0)
    is_best = inside & ((is_nan & has_nan) | ((x == best) & (not has_nan)))
    found = tl.min(tl.where(is_best, column, width), 0)
    value = tl.where(has_nan, float("nan"), best)
    name = found.to(tl.int64)
    if names_ptr is not None:
        name = tl.load(names_ptr + row * stride + found)
    out = row * tl.num_programs(1) + chunk
    tl.store(values_ptr + out, value.to(values_ptr.dtype.element_ty))
    tl.store(columns_ptr + out, name)
