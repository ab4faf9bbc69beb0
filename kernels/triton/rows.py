"""Some rows of a matrix, in one launch: torch takes several times as long where they are few."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .early_launch import await_inputs, launch_options
from .launch import ceil_div, power_of_two

_BLOCK = 1024


def rows_of(matrix: Tensor, rows: Tensor, scale: float = 1.0) -> Tensor:
    """matrix [n, width] at rows [T] int64, times scale -> [T, width]. Its rows are dense; they may lie apart."""
    width = matrix.shape[1]
    out = torch.empty(len(rows), width, dtype=matrix.dtype, device=matrix.device)
    if len(rows):
        block = min(power_of_two(width), _BLOCK)
        _rows_of[(len(rows), ceil_div(width, block))](
            matrix, rows, out, matrix.stride(0), width, scale,
            IS_SCALED=scale != 1.0, BLOCK=block, num_warps=4, **launch_options(matrix.device),
        )
    return out


@triton.jit
def _rows_of(matrix_ptr, rows_ptr, out_ptr, stride, width, scale, IS_SCALED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    await_inputs(EARLY)
    nth = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(matrix_ptr + tl.load(rows_ptr + nth) * stride + column, mask=inside)
    if IS_SCALED:
        x = (x.to(tl.float32) * scale).to(x.dtype)
    tl.store(out_ptr + nth * width + column, x, mask=inside)
