"""Products with few rows, whose weights stream at the memory's speed; and products that any batch cuts alike."""

# a launch takes options that are no parameters
# pyright: reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

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
) -> Tensor:
    """x [T, in] @ weight [out, in].T + bias [out] + residual [T, out] -> [T, out] in x's dtype, T <= MAX_ROWS; one launch.

    weight: contiguous, as checkpoints have it, in x's dtype or in float8 with scales [out] for its rows. Sums are made in
    float32 in a fixed order: the same bits in every run.
    """
    rows, depth = x.shape
    assert rows <= MAX_ROWS, "more rows than a skinny product has"
    is_narrow = weight.itemsize == 1 and x.dtype != torch.float32
    columns = _COLUMNS_FLOAT8 if is_narrow and len(weight) > PROGRAMS * _COLUMNS else _COLUMNS
    blocks = ceil_div(len(weight), columns)
    splits = max(1, min(PROGRAMS // blocks, depth // (4 * _DEPTH)))
    out = torch.empty(rows, len(weight), dtype=x.dtype, device=x.device)
    if rows:
        tile_rows = 16 if rows <= 16 else 32
        _launch((1, blocks, splits), x, weight, out, bias, residual, scales, workspace, splits, tile_rows, columns, num_stages=5)
    return out


def fixed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """The same for any T, with tiles that do not depend on T: a row's result is the same bits in any batch."""
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    if len(x):
        grid = (ceil_div(len(x), 64), ceil_div(len(weight), _COLUMNS), 1)
        _launch(grid, x, weight, out, bias, residual, None, None, 1, 64, _COLUMNS, num_stages=4)
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
    tile_rows: int,
    columns: int,
    num_stages: int,
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
        ceil_div(ceil_div(depth, splits), _DEPTH) * _DEPTH,
        SPLITS=splits,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_SCALES=scales is not None,
        IS_EVEN=depth % _DEPTH == 0,
        ROWS=tile_rows,
        COLUMNS=columns,
        DEPTH=_DEPTH,
        num_warps=4,
        num_stages=2 if is_float32 else num_stages,
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
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    block = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    is_row = row < rows
    is_column = column < columns
    x_at = x_ptr + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    weight_at = weight_ptr + column.to(tl.int64)[None, :] * depth + k[:, None]
    if EARLY and IS_EVEN:
        BYTES: tl.constexpr = DEPTH * weight_ptr.dtype.element_ty.primitive_bitwidth // 8
        ahead = split * share + tl.arange(0, BYTES_AHEAD // (COLUMNS * BYTES)) * DEPTH
        is_ahead = is_column[None, :] & (ahead < tl.minimum((split + 1) * share, depth))[:, None]
        ask_for(weight_ptr + column.to(tl.int64)[None, :] * depth + ahead[:, None], is_ahead, BYTES)
    wait_for_inputs(EARLY)
    # 8-bit weights stand where a product has its rows: that operand of a tensor core may come from registers.
    IS_FIRST: tl.constexpr = weight_ptr.dtype.element_ty.primitive_bitwidth == 8 and x_ptr.dtype.element_ty != tl.float32
    acc = tl.zeros((COLUMNS, ROWS) if IS_FIRST else (ROWS, COLUMNS), tl.float32)
    for start in range(split * share, tl.minimum((split + 1) * share, depth), DEPTH):
        x_mask = is_row[:, None]
        weight_mask = is_column[None, :]
        if not IS_EVEN:
            x_mask = x_mask & (start + k < depth)[None, :]
            weight_mask = weight_mask & (start + k < depth)[:, None]
        x = tl.load(x_at + start, mask=x_mask, other=0.0)
        weight = tl.load(weight_at + start, mask=weight_mask, other=0.0, eviction_policy="evict_first")
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
        arrived_ptr, SPLITS, HAS_BIAS, HAS_RESIDUAL, HAS_SCALES, ROWS, COLUMNS,
    )  # fmt: skip


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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add up the splits of a block of columns, whose sums [ROWS, COLUMNS] this one's are; scale, add and store what comes out."""
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
    mask = is_row[:, None] & is_column[None, :]
    if HAS_RESIDUAL:
        residual_at = residual_ptr + row.to(tl.int64)[:, None] * residual_stride + column[None, :]
        acc += tl.load(residual_at, mask=mask, other=0.0).to(tl.float32)
    out_at = out_ptr + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=mask)
