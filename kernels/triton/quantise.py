"""Rows as 8-bit floats with a scale for each, in one launch; `kernels.fp8.quantised` is the reference, bit for bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fp8 import FP8, LARGEST
from .early_launch import await_inputs, launch_options
from .launch import power_of_two, warps_for


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [n, k] as e4m3 [n, k] times scales [n, 1] float32; a row of zeros has scale 1."""
    rows, width = x.shape
    values = torch.empty(rows, width, dtype=FP8, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if rows:
        block = power_of_two(width)
        _quantise[(rows,)](
            x, values, scales, x.stride(0), width, LARGEST=LARGEST, BLOCK=block, num_warps=warps_for(block), **launch_options(x.device)
        )
    return values, scales


@triton.jit
def _quantise(x_ptr, values_ptr, scales_ptr, x_stride, width, LARGEST: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    await_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    # NaN is no maximum here, so a row that has one is asked; as in the reference its scale is 1.
    scale = tl.div_rn(tl.max(tl.abs(x), 0), LARGEST)
    has_nan = tl.max((x != x).to(tl.int32), 0) > 0
    scale = tl.where((scale > 0.0) & (has_nan == 0), scale, 1.0)
    y = tl.div_rn(x, tl.zeros_like(x) + scale)
    # e4m3 has no infinity: what rounding carries beyond its range stays at its ends
    y = tl.clamp(y, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(values_ptr + row * width + column, y.to(values_ptr.dtype.element_ty), mask=inside)
    tl.store(scales_ptr + row, scale)
