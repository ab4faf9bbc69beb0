"""Products with 4-bit weights, which few rows stream and make whole in registers; for many rows a whole weight is made first.

The number format is int4.py's, which has the reference too.
"""

# a launch takes options that are no parameters
# pyright: reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..int4 import GROUP, TILE, Int4Matrix
from .early_launch import ask_for, await_inputs, launch_options, let_next_come, wait_for_inputs
from .launch import ceil_div
from .linear import BYTES_AHEAD, MAX_ROWS, MOST_COLUMNS, PROGRAMS, Workspace, finish_product

SKINNY_ROWS = 64
"""Most rows of `skinny_int4_linear`."""

TILED_ROWS = 256
"""Up to here making weights whole for every 64 rows is less work than writing and reading whole ones."""

_COLUMNS = MOST_COLUMNS
"""Outputs of a program: as many as one instruction of a tensor core multiplies."""

_SLICE = 2**25
"""Weights that `wide_int4_linear` makes whole at a time: 64 MB in bfloat16."""


def int4_linear(
    x: Tensor, weight: Int4Matrix, workspace: Workspace, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """x [T, in] @ weight.T + bias [out] + residual [T, out] -> [T, out] in x's dtype, in the way that suits T."""
    if len(x) <= SKINNY_ROWS:
        return skinny_int4_linear(x, weight, workspace, bias, residual)
    return (fixed_int4_linear if len(x) <= TILED_ROWS else wide_int4_linear)(x, weight, bias, residual)


def skinny_int4_linear(
    x: Tensor, weight: Int4Matrix, workspace: Workspace, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """The same for T <= SKINNY_ROWS, in one launch.

    Weights are multiplied exactly as they are; sums are made in float32 in a fixed order: the same bits in every run.
    """
    rows, tiles = len(x), len(weight.words)
    assert rows <= SKINNY_ROWS, "more rows than a skinny product has"
    tile_rows = 16 if rows <= 16 else 32 if rows <= 32 else 64
    blocks = ceil_div(weight.num_outputs, _COLUMNS)
    programs = min(PROGRAMS, PROGRAMS * MAX_ROWS // tile_rows)  # whose sums the workspace has room for
    splits = max(1, min(programs // blocks, tiles // 4))
    return _product((1, blocks, splits), x, weight, bias, residual, workspace, tile_rows)


def fixed_int4_linear(x: Tensor, weight: Int4Matrix, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """The same for any T, with tiles that do not depend on T: a row's result is the same bits in any batch."""
    grid = (ceil_div(len(x), 64), ceil_div(weight.num_outputs, _COLUMNS), 1)
    return _product(grid, x, weight, bias, residual, None, 64)


def wide_int4_linear(x: Tensor, weight: Int4Matrix, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """The same for many rows: weights in x's dtype, made whole slice by slice, and torch's product."""
    out = torch.empty(len(x), weight.num_outputs, dtype=x.dtype, device=x.device)
    step = max(_SLICE // weight.depth, 1)
    for start in range(0, weight.num_outputs, step):
        part = slice(start, min(start + step, weight.num_outputs))
        matrix = dequantised(weight, part.start, part.stop, x.dtype).t()
        if residual is None:
            torch.mm(x, matrix, out=out[:, part])
        else:
            torch.addmm(residual[:, part], x, matrix, out=out[:, part])
    return out if bias is None else out.add_(bias)


def dequantised(weight: Int4Matrix, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Outputs start to stop - 1 of the weight, [stop - start, in] in dtype; one launch."""
    out = torch.empty(stop - start, weight.depth, dtype=dtype, device=weight.scales.device)
    words = weight.words.view(torch.int16)
    grid = (len(words), ceil_div(stop - start, 64))
    _dequantise[grid](
        words, weight.group_scales, weight.scales, out, start, stop, weight.num_outputs, weight.depth,
        COLUMNS=64, GROUP=GROUP, num_warps=4, **launch_options(words.device),
    )  # fmt: skip
    return out


def _product(
    grid: tuple[int, int, int],
    x: Tensor,
    weight: Int4Matrix,
    bias: Tensor | None,
    residual: Tensor | None,
    workspace: Workspace | None,
    tile_rows: int,
) -> Tensor:
    out = torch.empty(len(x), weight.num_outputs, dtype=x.dtype, device=x.device)
    if not len(x):
        return out
    tiles, splits = len(weight.words), grid[2]
    _linear_int4[grid](
        x,
        weight.words,
        weight.group_scales,
        weight.scales,
        out,
        bias,
        residual,
        None if workspace is None else workspace.partial,
        None if workspace is None else workspace.arrived,
        len(x),
        weight.num_outputs,
        weight.depth,
        tiles,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        ceil_div(tiles, splits),
        SPLITS=splits,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        IS_EVEN=weight.depth % TILE == 0,
        ROWS=tile_rows,
        COLUMNS=_COLUMNS,
        GROUP=GROUP,
        num_warps=4,
        num_stages=2 if x.dtype == torch.float32 else 6 if tile_rows <= 32 else 4,
        **launch_options(x.device),
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _linear_int4(
    x_ptr,
    words_ptr,
    groups_ptr,
    scales_ptr,
    out_ptr,
    bias_ptr,
    residual_ptr,
    partial_ptr,
    arrived_ptr,
    rows,
    columns,
    depth,
    tiles,
    x_stride,
    residual_stride,
    share,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    EARLY: tl.constexpr,
):
    # Outputs stand where a product has its rows: that operand of a tensor core may come from registers, where weights are made.
    block = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, GROUP)
    is_row = row < rows
    is_column = column < columns
    x_at = x_ptr + row.to(tl.int64)[None, :] * x_stride + k[:, None]
    words_at = words_ptr + column.to(tl.int64)[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
    if EARLY:
        # Outputs of a tile lie side by side, 64 bytes of each: four at a time.
        some = block * COLUMNS + tl.arange(0, COLUMNS // 4) * 4
        ahead = split * share + tl.arange(0, BYTES_AHEAD // (2 * GROUP))
        is_ahead = (some + 4 <= columns)[None, :] & (ahead < tl.minimum((split + 1) * share, tiles))[:, None]
        ask_for(words_ptr + (ahead.to(tl.int64)[:, None] * columns + some[None, :]) * (GROUP // 2), is_ahead, 8 * GROUP)
    wait_for_inputs(EARLY)
    acc = tl.zeros((COLUMNS, ROWS), tl.float32)
    for tile in range(split * share, tl.minimum((split + 1) * share, tiles)):
        first = tl.cast(tile, tl.int64) * columns
        group_scales = tl.load(groups_ptr + first + column, mask=is_column, other=0)
        words = tl.load(words_at + first * (GROUP // 2), mask=is_column[:, None], other=0, eviction_policy="evict_first")
        for group in tl.static_range(4):
            start = (tile * 4 + group) * GROUP
            mask = is_row[None, :] if IS_EVEN else is_row[None, :] & (start + k < depth)[:, None]
            x = tl.load(x_at + start, mask=mask, other=0.0)
            integers = integers_of(words >> (4 * group) & 0xF000F, group_scales >> (8 * group) & 0xFF, x.dtype)
            acc = tl.dot(integers, x, acc, input_precision="ieee")
    let_next_come(EARLY)
    finish_product(
        tl.trans(acc), row, column, block, split, rows, columns, residual_stride, out_ptr, bias_ptr, residual_ptr, scales_ptr,
        partial_ptr, arrived_ptr, SPLITS, HAS_BIAS, HAS_RESIDUAL, True, ROWS, COLUMNS,
    )  # fmt: skip


@triton.jit
def integers_of(pairs, group_scales, dtype: tl.constexpr):
    """group_scale [C] * (nibble - 8) [C, 32] in dtype, exactly. pairs [C, 16]: a nibble in each half.

    A small integer put into the lowest bits of a power of two is added to it, here for both halves at once: conversions to
    floats take several times as long.
    """
    if dtype == tl.float32:
        low, high = (pairs & 15).to(dtype) - 8.0, (pairs >> 16).to(dtype) - 8.0
        scales = group_scales.to(dtype)
    else:
        POWER: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0
        BITS: tl.constexpr = 0x4300 if dtype == tl.bfloat16 else 0x6400
        bits = pairs | (BITS << 16 | BITS)
        low = (bits & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True) - (POWER + 8.0)
        high = (bits >> 16).to(tl.uint16).to(dtype, bitcast=True) - (POWER + 8.0)
        scales = (group_scales | BITS).to(tl.uint16).to(dtype, bitcast=True) - POWER
    return tl.join(low * scales[:, None], high * scales[:, None]).reshape(pairs.shape[0], 2 * pairs.shape[1])


@triton.jit(do_not_specialize=["start", "stop"])
def _dequantise(
    words_ptr, groups_ptr, scales_ptr, out_ptr, start, stop, columns, depth,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    tile = tl.program_id(0)
    column = start + tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, GROUP)
    is_column = column < stop
    place = tl.cast(tile, tl.int64) * columns + column
    group_scales = tl.load(groups_ptr + place, mask=is_column, other=0)
    scales = tl.load(scales_ptr + column, mask=is_column, other=0.0)
    words = tl.load(words_ptr + place[:, None] * GROUP + k[None, :], mask=is_column[:, None], other=0)
    for group in tl.static_range(4):
        integers = ((words >> (4 * group) & 15).to(tl.int32) - 8) * (group_scales >> (8 * group) & 0xFF)[:, None]
        weight = integers.to(tl.float32) * scales[:, None]
        at = (tile * 4 + group) * GROUP + k
        out_at = out_ptr + (column - start).to(tl.int64)[:, None] * depth + at[None, :]
        tl.store(out_at, weight.to(out_ptr.dtype.element_ty), mask=is_column[:, None] & (at < depth)[None, :])
