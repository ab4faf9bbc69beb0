"""Products with 4-bit weights, which few rows stream and make whole in registers; for many rows a whole weight is made first.

The number format is int4.py's, which has the reference too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..int4 import GROUP, TILE, Int4Matrix
from .activations import gated_activation
from .early_launch import ask_for, await_inputs, launch_options, let_next_come, wait_for_inputs
from .launch import ceil_div
from .linear import (
    BYTES_AHEAD,
    IS_COMPILED,
    MAX_ROWS,
    MOST_COLUMNS,
    PROGRAMS,
    Workspace,
    blocks_of,
    columns_of,
    finish_product,
    read,
)

SKINNY_ROWS = 64
"""Most rows of `skinny_int4_linear`."""

TILED_ROWS = 256
"""Up to here making weights whole for every 64 rows is less work than writing and reading whole ones."""

_TILES = {16: (64, 4, 6), 32: (64, 4, 5), 64: (64, 4, 4)}
"""By the rows of a program: its outputs, its warps, and how many tiles of weights are on their way or being multiplied.

An instruction of a tensor core multiplies 64 outputs.
"""

_WIDE_TILES = {**_TILES, 16: (128, 4, 5), 32: (128, 4, 4)}
"""The same where _TILES make more programs than run at once: twice as many outputs share what is done once a tile, and the inputs."""

_TILE_FLOAT32 = (64, 4, 2)

_SLICE = 2**25
"""Weights that `wide_int4_linear` makes whole at a time: 64 MB in bfloat16."""


def int4_linear(
    x: Tensor,
    weight: Int4Matrix,
    workspace: Workspace,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    function: str | None = None,
) -> Tensor:
    """x [T, in] @ weight.T + bias [out] + residual [T, out] -> [T, out] in x's dtype, in the way that suits T.

    function: outputs are gate | up, and what comes out is function(gate) * up [T, out // 2]; then there is no residual.
    """
    if len(x) <= SKINNY_ROWS:
        return skinny_int4_linear(x, weight, workspace, bias, residual, function)
    out = (fixed_int4_linear if len(x) <= TILED_ROWS else wide_int4_linear)(x, weight, bias, residual)
    return out if function is None else gated_activation(out, None, function)


def skinny_int4_linear(
    x: Tensor,
    weight: Int4Matrix,
    workspace: Workspace,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    function: str | None = None,
) -> Tensor:
    """The same for T <= SKINNY_ROWS, in one launch.

    Weights are multiplied exactly as they are; sums are made in float32 in a fixed order: the same bits in every run. What is gated are
    sums that nothing has rounded.
    """
    rows, tiles = len(x), len(weight.words)
    assert rows <= SKINNY_ROWS, "more rows than a skinny product has"
    assert function is None or residual is None, "a residual is added to what comes out"
    tile_rows = 16 if rows <= 16 else 32 if rows <= 32 else 64
    columns = _tile(tile_rows, weight.num_outputs, x.dtype)[0]
    programs = min(PROGRAMS, PROGRAMS * MAX_ROWS * MOST_COLUMNS // (tile_rows * columns))  # whose sums the workspace has room for
    splits = max(1, min(programs // blocks_of(weight.num_outputs, columns, function), tiles // 4))
    return _product(x, weight, bias, residual, workspace, tile_rows, splits, function)


def fixed_int4_linear(x: Tensor, weight: Int4Matrix, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """The same for any T, with tiles that do not depend on T: a row's result is the same bits in any batch."""
    return _product(x, weight, bias, residual, None, 64, 1, None)


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
    )
    return out


def _tile(tile_rows: int, num_outputs: int, dtype: torch.dtype) -> tuple[int, int, int]:
    if dtype == torch.float32:
        return _TILE_FLOAT32
    columns = _TILES[tile_rows][0]
    return (_TILES if num_outputs <= PROGRAMS * columns else _WIDE_TILES)[tile_rows]


def _product(
    x: Tensor,
    weight: Int4Matrix,
    bias: Tensor | None,
    residual: Tensor | None,
    workspace: Workspace | None,
    tile_rows: int,
    splits: int,
    function: str | None,
) -> Tensor:
    outputs = weight.num_outputs
    out = torch.empty(len(x), outputs if function is None else outputs // 2, dtype=x.dtype, device=x.device)
    if not len(x):
        return out
    tiles, (columns, warps, stages) = len(weight.words), _tile(tile_rows, weight.num_outputs, x.dtype)
    assert weight.words.numel() < 2**31, "places of words are counted in 32 bits"
    _linear_int4[(ceil_div(len(x), tile_rows), blocks_of(outputs, columns, function), splits)](
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
        outputs,
        weight.depth,
        tiles,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        ceil_div(tiles, splits),
        SPLITS=splits,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        FUNCTION=function,
        IS_EVEN=weight.depth % TILE == 0,
        ROWS=tile_rows,
        COLUMNS=columns,
        GROUP=GROUP,
        num_warps=warps,
        num_stages=stages,
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
    FUNCTION: tl.constexpr,
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
    RUN: tl.constexpr = 8
    column = columns_of(block, tl.arange(0, COLUMNS), columns, COLUMNS, FUNCTION, RUN)
    TILE: tl.constexpr = 4 * GROUP
    IS_PACKED: tl.constexpr = IS_COMPILED and x_ptr.dtype.element_ty != tl.float32
    DEPTH: tl.constexpr = TILE if IS_PACKED else GROUP
    k = tl.arange(0, DEPTH)
    is_row = row < rows
    x_at = x_ptr + row.to(tl.int64)[None, :] * x_stride + k[:, None]
    read_column = tl.minimum(column, columns - 1).to(tl.int64)  # what comes of columns that are none is not stored
    groups_at = groups_ptr + read_column
    words_at = words_ptr + read_column[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
    if EARLY:
        # Outputs of a tile lie side by side, 64 bytes of each: four at a time.
        some = columns_of(block, tl.arange(0, COLUMNS // 4) * 4, columns, COLUMNS, FUNCTION, RUN)
        ahead = split * share + tl.arange(0, BYTES_AHEAD // (COLUMNS * 2 * GROUP))
        is_ahead = (some + 4 <= columns)[None, :] & (ahead < tl.minimum((split + 1) * share, tiles))[:, None]
        ask_for(words_ptr + (ahead.to(tl.int64)[:, None] * columns + some[None, :]) * (GROUP // 2), is_ahead, 8 * GROUP)
    wait_for_inputs(EARLY)
    acc = tl.zeros((COLUMNS, ROWS), tl.float32)
    for tile in range(split * share, tl.minimum((split + 1) * share, tiles)):
        group_scales = tl.load(groups_at + tile * columns)
        words = tl.load(words_at + tile * columns * (GROUP // 2), eviction_policy="evict_first")
        for part in tl.static_range(TILE // DEPTH):
            start = tile * TILE + part * GROUP
            mask = is_row[None, :] if IS_EVEN else is_row[None, :] & (start + k < depth)[:, None]
            x = tl.load(x_at + start, mask=mask, other=0.0)
            if IS_PACKED:
                integers = packed_integers_of(words, group_scales, x.dtype)
            else:
                integers = integers_of(words >> (4 * part) & 0xF000F, group_scales >> (8 * part) & 0xFF, x.dtype)
            acc = tl.dot(integers, x, acc, input_precision="ieee")
        if IS_PACKED:
            acc = read(acc)
    let_next_come(EARLY)
    if IS_PACKED:
        acc *= unit_of(x_ptr.dtype.element_ty)
    finish_product(
        tl.trans(acc), row, column, block, split, rows, columns, residual_stride, out_ptr, bias_ptr, residual_ptr, scales_ptr,
        partial_ptr, arrived_ptr, SPLITS, HAS_BIAS, HAS_RESIDUAL, True, FUNCTION, ROWS, COLUMNS, RUN,
    )


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


# Two weights an instruction, one in each half of a register. A nibble masked out of a word is already a 16-bit float that is linear in
# it: bfloat16 is linear in all of its lowest 8 bits, from 0 in steps of 2^-133; float16 in its lowest 10 on top of the bits of 1024.
# Those of odd groups stand 4 bits higher, count 16 times as much, and meet a 16th of the scale. One multiplication and addition then
# makes group_scale * (nibble - 8) * unit, and has nothing to round. A group scale becomes a float by being the lowest bits of a power
# of two, which is taken off again. Of two constants in one, the upper is that of odd groups.


def _scaling(kind: str, above: int, factor: int, less: int, minus: int) -> tl.constexpr:
    """Group scales $4 -> what nibbles are multiplied by, of groups 0 and 1 in $0, of 2 and 3 in $1; what is added then, in $2 and $3."""
    of_pairs = [
        f"prmt.b32 s, $4, {above:#x}, {order:#x}; fma.rn.{kind} s, s, f, l; mov.b32 ${pair}, s; fma.rn.{kind} ${2 + pair}, s, m, z;"
        for pair, order in enumerate((0x5140, 0x5342))
    ]
    constants = f"mov.b32 f, {factor:#x}; mov.b32 l, {less:#x}; mov.b32 m, {minus:#x}; mov.b32 z, 0x80008000;"
    return tl.constexpr(f"{{ .reg .b32 s, f, l, m, z; {constants} {' '.join(of_pairs)} }}")


def _widening(kind: str, bits: int) -> tl.constexpr:
    """A word $8, and what `_scaling` makes in $9 to $12 -> the weights of group g, in the registers 2 g and 2 g + 1."""
    of_groups = [
        f"lop3.b32 t, w, {0xF000F << 4 * (group % 2):#x}, {bits:#x}, 0xEA; "  # w & mask | bits
        f"mov.b32 {{e, o}}, ${9 + group // 2}; mov.b32 s, {{{'eo'[group % 2]}, {'eo'[group % 2]}}}; "
        f"mov.b32 {{e, o}}, ${11 + group // 2}; mov.b32 a, {{{'eo'[group % 2]}, {'eo'[group % 2]}}}; "
        f"fma.rn.{kind} t, t, s, a; mov.b32 {{${2 * group}, ${2 * group + 1}}}, t;"
        for group in range(4)
    ]
    of_groups.insert(2, "shr.u32 w, w, 8;")
    return tl.constexpr(f"{{ .reg .b32 w, t, s, a; .reg .b16 e, o; mov.b32 w, $8; {' '.join(of_groups)} }}")


# Above a scale's bits stand those of 2^125 and 2^121; what comes out is multiplied by -2^-130 and -2^-126 to be added.
_SCALING_BF16 = _scaling("bf16x2", 0x7C7E, 0x3F803F80, 0xFC00FE00, 0x80808008)
# Above stand those of 1024, of odd groups a 16th of that is left; multiplied by -1032 and -72 * 16.
_SCALING_FP16 = _scaling("f16x2", 0x6464, 0x2C003C00, 0xD400E400, 0xE480E408)
_WIDENING_BF16 = _widening("bf16x2", 0)
_WIDENING_FP16 = _widening("f16x2", 0x64006400)


@triton.jit
def packed_integers_of(words, group_scales, dtype: tl.constexpr):
    """The same of a tile's words [C, 16] and group scales [C], before they are taken apart -> [C, 128], divided by `unit_of`."""
    SCALING: tl.constexpr = _SCALING_BF16 if dtype == tl.bfloat16 else _SCALING_FP16
    WIDENING: tl.constexpr = _WIDENING_BF16 if dtype == tl.bfloat16 else _WIDENING_FP16
    s0, s2, a0, a2 = tl.inline_asm_elementwise(
        SCALING, "=&r,=&r,=&r,=&r,r", [group_scales], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
    )
    a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
        WIDENING, "=&h,=&h,=&h,=&h,=&h,=&h,=&h,=&h,r,r,r,r,r", [words, s0[:, None], s2[:, None], a0[:, None], a2[:, None]],
        dtype=(tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=1,
    )
    low, high = tl.join(tl.join(a, c), tl.join(e, g)), tl.join(tl.join(b, d), tl.join(f, h))  # [C, 16, group % 2, group // 2]
    halves = tl.permute(tl.join(low, high), (0, 3, 2, 1, 4))
    return tl.reshape(halves, (words.shape[0], 8 * words.shape[1])).to(dtype, bitcast=True)


@triton.jit
def unit_of(dtype: tl.constexpr):
    """A power of two, so that nothing is rounded by it."""
    return 32768.0 if dtype == tl.bfloat16 else 1.0


@triton.jit(do_not_specialize=["start", "stop"])
def _dequantise(
    words_ptr, groups_ptr, scales_ptr, out_ptr, start, stop, columns, depth,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr, EARLY: tl.constexpr,
):
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
