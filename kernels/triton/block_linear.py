"""Products of runs of columns, each by a small matrix of its own: those of latent attention's heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .early_launch import launch_options, let_next_come, wait_for_inputs
from .launch import ceil_div, power_of_two

_MOST_ROWS = 64
_COLUMNS = 64
_DEPTH = 64


def block_linear(x: Tensor, weight: Tensor, groups: int, is_fixed: bool = False) -> Tensor:
    """x [T, groups * in] @ block g of weight [groups * out, in].T of columns g -> [T, groups * out] in x's dtype; one launch.

    weight: contiguous, in x's dtype. is_fixed: with tiles that do not depend on T, so that a row's result is the same bits in any batch.
    """
    assert weight.is_contiguous(), "weights are read as [out, in]"
    rows, (outputs, depth) = len(x), weight.shape
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if rows:
        outputs //= groups
        tile = _MOST_ROWS if is_fixed else min(power_of_two(rows, 16), _MOST_ROWS)
        _block_linear[(ceil_div(rows, tile), ceil_div(outputs, _COLUMNS), groups)](
            x,
            weight,
            out,
            rows,
            outputs,
            depth,
            x.stride(0),
            out.stride(0),
            ROWS=tile,
            COLUMNS=_COLUMNS,
            DEPTH=_DEPTH,
            num_warps=4,
            num_stages=2 if x.dtype == torch.float32 else 4,
            **launch_options(x.device),
        )
    return out


@triton.jit(do_not_specialize=["rows"])
def _block_linear(
    x_ptr,
    weight_ptr,
    out_ptr,
    rows,
    outputs,
    depth,
    x_stride,
    out_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A tile of what one block makes of its columns."""
    let_next_come(EARLY)
    group = tl.program_id(2)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    is_row, is_column = row < rows, column < outputs
    x_at = x_ptr + row[:, None] * x_stride + group * depth + k[None, :]
    weight_at = weight_ptr + (group * outputs + column).to(tl.int64)[None, :] * depth + k[:, None]
    wait_for_inputs(EARLY)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, depth, DEPTH):
        inside = start + k < depth
        x = tl.load(x_at + start, mask=is_row[:, None] & inside[None, :], other=0.0)
        weight = tl.load(weight_at + start, mask=is_column[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    out_at = out_ptr + row[:, None] * out_stride + (group * outputs + column)[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
