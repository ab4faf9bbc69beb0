"""Products with few rows, whose weights stream at the memory's speed; and products that any batch cuts alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from .activations import gated_of
from .early_launch import ask_for, launch_options, let_next_come, wait_for_inputs
from .launch import MULTIPROCESSORS, ceil_div

MAX_ROWS = 32
"""Up to here `skinny_linear` is worth a try; beyond, torch."""

_COLUMNS = 32
"""Outputs of a program: few, so that there are many programs with loads in flight."""

_COLUMNS_FLOAT8 = 64
"""The same of 8-bit weights where _COLUMNS make more programs than run at once: as many as one instruction of a tensor core multiplies
from registers, where they are widened."""

MOST_COLUMNS = 128
"""No kernel that uses a `Workspace` has more outputs in a program."""

_DEPTH = 128

BYTES_AHEAD = tl.constexpr(2**15)
"""What a program that came early asks for while it waits. A GPU full of programs asks for a fourth of its cache."""

PROGRAMS = 3 * MULTIPROCESSORS

IS_COMPILED = tl.constexpr(not knobs.runtime.interpret)
"""Triton's interpreter knows no assembly."""


@dataclass(frozen=True)
class _Tile:
    """What a program multiplies at a time, and how many of that are on their way or being multiplied."""

    rows: int
    columns: int
    depth: int
    stages: int


_FIXED = _Tile(64, 32, 128, 4)
"""Of products that any batch cuts alike."""


class Workspace:
    """Scratch of `skinny_linear`, one for each stream: launches that may run at the same time must not share it."""

    def __init__(self, device: torch.device | str) -> None:
        self.partial = torch.empty(PROGRAMS * MAX_ROWS * MOST_COLUMNS, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)  # all 0 between launches


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    workspace: Workspace,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scales: Tensor | None = None,
    function: str | None = None,
) -> Tensor:
    """x [T, in] @ weight [out, in].T + bias [out] + residual [T, out] -> [T, out] in x's dtype, T <= MAX_ROWS; one launch.

    weight: contiguous, as checkpoints have it, in x's dtype or in float8 with scales [out] for its rows. Sums are made in
    float32 in a fixed order: the same bits in every run. function: outputs are gate | up, and what comes out is function(gate) * up
    [T, out // 2], as `gated_activation` has it, of sums that nothing has rounded; then there is no residual.
    """
    rows, depth = x.shape
    assert rows <= MAX_ROWS, "more rows than a skinny product has"
    assert function is None or residual is None, "a residual is added to what comes out"
    is_narrow = weight.itemsize == 1 and x.dtype != torch.float32
    columns = _COLUMNS_FLOAT8 if is_narrow and len(weight) > PROGRAMS * _COLUMNS else _COLUMNS
    blocks = blocks_of(len(weight), columns, function)
    splits = max(1, min(PROGRAMS // blocks, depth // (4 * _DEPTH)))
    out = torch.empty(rows, len(weight) if function is None else len(weight) // 2, dtype=x.dtype, device=x.device)
    if rows:
        tile = _Tile(16 if rows <= 16 else 32, columns, _DEPTH, 5)
        _launch((1, blocks, splits), x, weight, out, bias, residual, scales, workspace, splits, tile, function)
    return out


def blocks_of(outputs: int, columns: int, function: str | None) -> int:
    """Blocks of so many columns that a weight's outputs are; a gated product's are half gates and half ups."""
    return ceil_div(outputs, columns) if function is None else ceil_div(outputs // 2, columns // 2)


def fixed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """The same for any T, with tiles that do not depend on T: a row's result is the same bits in any batch."""
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    if len(x):
        grid = (ceil_div(len(x), _FIXED.rows), ceil_div(len(weight), _FIXED.columns), 1)
        _launch(grid, x, weight, out, bias, residual, None, None, 1, _FIXED, None)
    return out


def _launch(
    grid: tuple[int, int, int],
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scales: Tensor | None,
    workspace: Workspace | None,
    splits: int,
    tile: _Tile,
    function: str | None,
) -> None:
    assert weight.is_contiguous(), "weights are read as [out, in]"
    depth = x.shape[1]
    is_float32 = x.dtype == torch.float32
    _linear[grid](
        x,
        weight,
        out,
        bias,
        residual,
        scales,
        None if workspace is None else workspace.partial,
        None if workspace is None else workspace.arrived,
        len(x),
        len(weight),
        depth,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        ceil_div(ceil_div(depth, splits), tile.depth) * tile.depth,
        SPLITS=splits,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_SCALES=scales is not None,
        FUNCTION=function,
        IS_EVEN=depth % tile.depth == 0,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        num_warps=4,
        num_stages=2 if is_float32 else tile.stages,
        **launch_options(x.device),
    )


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x_ptr,
    weight_ptr,
    out_ptr,
    bias_ptr,
    residual_ptr,
    scales_ptr,
    partial_ptr,
    arrived_ptr,
    rows,
    columns,
    depth,
    x_stride,
    residual_stride,
    share,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    FUNCTION: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    block = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # 8-bit weights stand where a product has its rows: that operand of a tensor core may come from registers.
    IS_FIRST: tl.constexpr = weight_ptr.dtype.element_ty.primitive_bitwidth == 8 and x_ptr.dtype.element_ty != tl.float32
    RUN: tl.constexpr = 8 if IS_FIRST else 1
    column = columns_of(block, tl.arange(0, COLUMNS), columns, COLUMNS, FUNCTION, RUN)
    k = tl.arange(0, DEPTH)
    is_row = row < rows
    is_column = column < columns
    x_at = x_ptr + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    read_column = tl.minimum(column, columns - 1).to(tl.int64)  # what comes of columns that are none is not stored
    weight_at = weight_ptr + read_column[None, :] * depth + k[:, None]
    if EARLY and IS_EVEN:
        BYTES: tl.constexpr = DEPTH * weight_ptr.dtype.element_ty.primitive_bitwidth // 8
        ahead = split * share + tl.arange(0, BYTES_AHEAD // (COLUMNS * BYTES)) * DEPTH
        is_ahead = is_column[None, :] & (ahead < tl.minimum((split + 1) * share, depth))[:, None]
        ask_for(weight_ptr + column.to(tl.int64)[None, :] * depth + ahead[:, None], is_ahead, BYTES)
    wait_for_inputs(EARLY)
    acc = tl.zeros((COLUMNS, ROWS) if IS_FIRST else (ROWS, COLUMNS), tl.float32)
    for start in range(split * share, tl.minimum((split + 1) * share, depth), DEPTH):
        if IS_EVEN:
            x = tl.load(x_at + start, mask=is_row[:, None], other=0.0)
            weight = tl.load(weight_at + start, eviction_policy="evict_first")
        else:
            inside = start + k < depth
            x = tl.load(x_at + start, mask=is_row[:, None] & inside[None, :], other=0.0)
            weight = tl.load(weight_at + start, mask=inside[:, None], other=0.0, eviction_policy="evict_first")
        # e4m3 by way of float32: straight to bfloat16 each number goes through a unit that takes longer than reading it does.
        weight = weight.to(tl.float32).to(x.dtype)
        if IS_FIRST:
            acc = read(tl.dot(tl.trans(weight), tl.trans(x), acc))
        else:
            acc = tl.dot(x, weight, acc, input_precision="ieee")
    let_next_come(EARLY)
    if IS_FIRST:
        acc = tl.trans(acc)
    finish_product(
        acc, row, column, block, split, rows, columns, residual_stride, out_ptr, bias_ptr, residual_ptr, scales_ptr, partial_ptr,
        arrived_ptr, SPLITS, HAS_BIAS, HAS_RESIDUAL, HAS_SCALES, FUNCTION, ROWS, COLUMNS, RUN,
    )


@triton.jit
def columns_of(block, place, columns, COLUMNS: tl.constexpr, FUNCTION: tl.constexpr, RUN: tl.constexpr):
    """The outputs at these places of a block. Of a gated product's, RUN gates and the RUN ups that they gate by turns.

    RUN: so many that both of a pair are in one thread when they have been multiplied, where a tensor core leaves them like that.
    """
    if FUNCTION is None:
        column = block * COLUMNS + place
    else:
        gate = block * (COLUMNS // 2) + place // (2 * RUN) * RUN + place % RUN
        column = gate + place // RUN % 2 * (columns // 2)
    return column


@triton.jit
def read(sums):
    """The sums themselves. As something reads them, the products of a turn of a loop are waited for once; else each is by itself."""
    if IS_COMPILED:
        return tl.inline_asm_elementwise("// $0", "=f,0", [sums], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return sums


@triton.jit
def finish_product(
    acc,
    row,
    column,
    block,
    split,
    rows,
    columns,
    residual_stride,
    out_ptr,
    bias_ptr,
    residual_ptr,
    scales_ptr,
    partial_ptr,
    arrived_ptr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    FUNCTION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RUN: tl.constexpr,
):
    """Add up the splits of a block of columns, whose sums [ROWS, COLUMNS] this one's are; scale, add, gate and store what comes out."""
    is_row = row < rows
    is_column = column < columns
    if SPLITS > 1:
        # Who comes last adds up all shares, in their order: no second launch, and nothing depends on who it was.
        tile = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        shares = partial_ptr + block * (SPLITS * ROWS * COLUMNS) + tile
        tl.store(shares + split * (ROWS * COLUMNS), acc)
        tl.debug_barrier()  # all threads have stored before one of them says so
        arrived = tl.atomic_add(arrived_ptr + block, 1, sem="acq_rel", scope="gpu")
        if arrived != SPLITS - 1:
            return
        tl.store(arrived_ptr + block, 0)
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for i in tl.static_range(SPLITS):
            acc += tl.load(shares + i * (ROWS * COLUMNS), cache_modifier=".cg")
    if HAS_SCALES:
        acc *= tl.load(scales_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if FUNCTION is not None:
        turns = tl.reshape(acc, (ROWS, COLUMNS // (2 * RUN), 2, RUN))
        gate, up = tl.split(tl.permute(turns, (0, 1, 3, 2)))
        acc = tl.reshape(gated_of(gate, up, FUNCTION), (ROWS, COLUMNS // 2))
        columns //= 2
        column = block * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        is_column = column < columns
    mask = is_row[:, None] & is_column[None, :]
    if HAS_RESIDUAL:
        residual_at = residual_ptr + row.to(tl.int64)[:, None] * residual_stride + column[None, :]
        acc += tl.load(residual_at, mask=mask, other=0.0).to(tl.float32)
    out_at = out_ptr + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=mask)
