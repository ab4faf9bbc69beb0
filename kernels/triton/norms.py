"""RMS norm and layer norm in Triton: one program a token, float32 within."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .early_launch import launch_options, let_next_come, wait_for_inputs
from .launch import power_of_two, warps_for


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, bias: Tensor | None = None, add_one: bool = False, centred: bool = False
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight + bias over the last dimension of x [T, width]; add_one: the weight is stored less one;
    centred: of x less its mean."""
    tokens, width = x.shape
    normed = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    if tokens:
        block = power_of_two(width)
        _rms_norm[(tokens,)](
            x,
            weight,
            bias,
            normed,
            x.stride(0),
            width,
            eps,
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None,
            ADD_ONE=add_one,
            CENTRED=centred,
            BLOCK=block,
            num_warps=warps_for(block),
            **launch_options(x.device),
        )
    return normed


@triton.jit
def _rms_norm(
    x_ptr,
    weight_ptr,
    bias_ptr,
    normed_ptr,
    x_stride,
    width,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD_ONE: tl.constexpr,
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_come(EARLY)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        if ADD_ONE:
            weight += 1.0
    wait_for_inputs(EARLY)
    x = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        x = tl.where(inside, x - tl.sum(x, 0) / width, 0.0)
    y = x / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    if HAS_WEIGHT:
        y *= weight
    if HAS_BIAS:
        y += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed_ptr + token * width + column, y.to(normed_ptr.dtype.element_ty), mask=inside)
