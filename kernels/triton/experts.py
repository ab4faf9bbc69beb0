"""Gated MLPs of which every row has some: each expert that any row has is read once for every tile of its rows.

An expert's rows are gathered on their way in, and what comes out is put back where the row is. Outputs stand where a product has its
rows: 16 rows then are enough for a tensor core, and weights may be made in registers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..expert_weights import ExpertWeights
from ..int4 import GROUP, TILE
from .activations import gated_of
from .early_launch import await_inputs, launch_options, let_next_come, wait_for_inputs
from .expert_routes import Router, Visits, group, route
from .launch import ceil_div
from .linear_int4 import integers_of

FEW_ROWS = 16
"""An expert that has no more rows on average has tiles of so many."""

_BLOCK = 1024


class _Tile(NamedTuple):
    rows: int
    columns: int
    depth: int


_FEW, _MANY = _Tile(FEW_ROWS, 32, 128), _Tile(64, 64, 64)
_COLUMNS_INT4 = 64  # as many as one instruction of a tensor core multiplies from registers


def experts(
    x: Tensor, logits: Tensor, inner: ExpertWeights, outer: ExpertWeights, function: str, router: Router, is_fixed: bool
) -> Tensor:
    """sum of weight * outer @ (function(gate @ x) * (up @ x)) over the experts that each row of x [T, in] has -> [T, out].

    logits [T, experts]: see `route`. inner: gates, then ups of each expert [2 n, in]; outer: [out, n]. function: one of
    `ops.ACTIVATIONS`, or CLAMPED. is_fixed: tiles do not depend on T, so that a row's result is the same bits in any batch. Sums are
    made in float32 in a fixed order: the same bits in every run.
    """
    top = router.top
    tile = _MANY if is_fixed or len(x) * top > FEW_ROWS * inner.count else _FEW
    chosen, weights = route(logits, router)
    visits = group(chosen, inner.count, tile.rows)
    between = _product(x, inner, visits, tile, top, function)
    return _mix(_product(between, outer, visits, tile, 0, None), weights)


def _product(x: Tensor, weights: ExpertWeights, visits: Visits, tile: _Tile, top: int, function: str | None) -> Tensor:
    """function: x is by rows, and a gated result by places in visits.order; None: x is by places, and the result by visits."""
    columns = weights.outputs // 2 if function else weights.outputs
    out = torch.empty(len(visits.order), columns, dtype=x.dtype, device=x.device)
    if not len(x):
        return out
    narrow, block = weights.is_int4, _COLUMNS_INT4 if weights.is_int4 else tile.columns
    _visit[(visits.most_tiles, ceil_div(columns, block))](
        x,
        weights.values,
        weights.group_scales,
        weights.scales,
        weights.bias,
        out,
        visits.order,
        visits.tiles,
        visits.num_tiles,
        columns,
        weights.depth,
        weights.values.shape[1],
        x.stride(0),
        TOP=top,
        FUNCTION=function,
        IS_INT4=narrow,
        IS_EVEN=weights.depth % (TILE if narrow else tile.depth) == 0,
        ROWS=tile.rows,
        COLUMNS=block,
        DEPTH=tile.depth,
        GROUP=GROUP,
        num_warps=4,
        num_stages=2 if x.dtype == torch.float32 else 4,
        **launch_options(x.device),
    )
    return out


def _mix(results: Tensor, weights: Tensor) -> Tensor:
    """results [T * top, width] by visits, weights [T, top] -> their weighted sums [T, width]."""
    (rows, top), width = weights.shape, results.shape[1]
    out = torch.empty(rows, width, dtype=results.dtype, device=results.device)
    if rows:
        _add_up[(rows, ceil_div(width, _BLOCK))](
            results, weights, out, width, TOP=top, BLOCK=_BLOCK, num_warps=4, **launch_options(results.device)
        )
    return out


@triton.jit
def _visit(
    x_ptr,
    weights_ptr,
    groups_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    order_ptr,
    tiles_ptr,
    num_tiles_ptr,
    columns,
    depth,
    depth_tiles,
    x_stride,
    TOP: tl.constexpr,
    FUNCTION: tl.constexpr,
    IS_INT4: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    tile = tl.program_id(0)
    if tile >= tl.load(num_tiles_ptr):
        return
    expert = tl.load(tiles_ptr + 3 * tile).to(tl.int64)
    place = tl.load(tiles_ptr + 3 * tile + 1) + tl.arange(0, ROWS)
    is_row = place < tl.load(tiles_ptr + 3 * tile + 2)
    visit = tl.load(order_ptr + place, mask=is_row, other=0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < columns
    IS_GATED: tl.constexpr = FUNCTION is not None
    if IS_GATED:
        outputs = 2 * columns
        from_row, to_row = visit // TOP, place
    else:
        outputs = columns
        from_row, to_row = place, visit
    x_at = x_ptr + from_row.to(tl.int64)[None, :] * x_stride
    first = tl.zeros((COLUMNS, ROWS), tl.float32)
    second = tl.zeros((COLUMNS, ROWS), tl.float32)
    if IS_INT4:
        k = tl.arange(0, GROUP)
        at = weights_ptr + (expert * depth_tiles * outputs + column)[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
        groups_at = groups_ptr + expert * depth_tiles * outputs + column
        for depth_tile in range(0, depth_tiles):
            skipped = tl.cast(depth_tile, tl.int64) * outputs
            words = tl.load(at + skipped * (GROUP // 2), mask=is_column[:, None], other=0)
            groups = tl.load(groups_at + skipped, mask=is_column, other=0)
            if IS_GATED:
                up_words = tl.load(at + (skipped + columns) * (GROUP // 2), mask=is_column[:, None], other=0)
                up_groups = tl.load(groups_at + skipped + columns, mask=is_column, other=0)
            for i in tl.static_range(4):
                start = (depth_tile * 4 + i) * GROUP
                x_mask = is_row[None, :] if IS_EVEN else is_row[None, :] & (start + k < depth)[:, None]
                x = tl.load(x_at + start + k[:, None], mask=x_mask, other=0.0)
                weights = integers_of(words >> (4 * i) & 0xF000F, groups >> (8 * i) & 0xFF, x.dtype)
                first = tl.dot(weights, x, first, input_precision="ieee")
                if IS_GATED:
                    weights = integers_of(up_words >> (4 * i) & 0xF000F, up_groups >> (8 * i) & 0xFF, x.dtype)
                    second = tl.dot(weights, x, second, input_precision="ieee")
    else:
        k = tl.arange(0, DEPTH)
        at = weights_ptr + (expert * outputs + column)[:, None] * depth + k[None, :]
        up_at = at + tl.cast(columns, tl.int64) * depth
        for start in range(0, depth, DEPTH):
            x_mask = is_row[None, :]
            mask = is_column[:, None]
            if not IS_EVEN:
                x_mask = x_mask & (start + k < depth)[:, None]
                mask = mask & (start + k < depth)[None, :]
            x = tl.load(x_at + start + k[:, None], mask=x_mask, other=0.0)
            # e4m3 by way of float32, see linear.py
            weights = tl.load(at + start, mask=mask, other=0.0).to(tl.float32).to(x.dtype)
            first = tl.dot(weights, x, first, input_precision="ieee")
            if IS_GATED:
                weights = tl.load(up_at + start, mask=mask, other=0.0).to(tl.float32).to(x.dtype)
                second = tl.dot(weights, x, second, input_precision="ieee")
    let_next_come(EARLY)
    if scales_ptr is not None:
        scales_at = scales_ptr + expert * outputs + column
        first *= tl.load(scales_at, mask=is_column, other=0.0)[:, None]
        if IS_GATED:
            second *= tl.load(scales_at + columns, mask=is_column, other=0.0)[:, None]
    if bias_ptr is not None:
        bias_at = bias_ptr + expert * outputs + column
        first += tl.load(bias_at, mask=is_column, other=0.0).to(tl.float32)[:, None]
        if IS_GATED:
            second += tl.load(bias_at + columns, mask=is_column, other=0.0).to(tl.float32)[:, None]
    if IS_GATED:
        first = gated_of(first, second, FUNCTION)
    out_at = out_ptr + to_row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out_at, tl.trans(first).to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _add_up(results_ptr, weights_ptr, out_ptr, width, TOP: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    await_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(TOP):
        visit = row * TOP + rank
        total += tl.load(weights_ptr + visit) * tl.load(results_ptr + visit * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, total.to(out_ptr.dtype.element_ty), mask=inside)
