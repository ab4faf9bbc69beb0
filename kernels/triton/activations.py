"""Activations in Triton, gated or not, over rows of any width."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .early_launch import await_inputs, launch_options
from .launch import ceil_div

_BLOCK = 1024


def activation(x: Tensor, function: str) -> Tensor:
    """function(x) for x [T, width]; function: one of `ops.ACTIVATIONS`."""
    return _launch(x, None, x.shape[1], function)


def gated_activation(gate: Tensor, up: Tensor | None, function: str) -> Tensor:
    """function(gate) * up, [T, width]; function "" = none, or CLAMPED. up None: gate [T, 2 * width] holds gate | up side by side; a gate of
    one column is for all of up."""
    if up is not None:
        return _launch(gate, up, up.shape[1], function)
    width = gate.shape[1] // 2
    return _launch(gate[:, :width], gate[:, width:], width, function)


def _launch(x: Tensor, up: Tensor | None, width: int, function: str) -> Tensor:
    out = torch.empty(len(x), width, dtype=x.dtype, device=x.device)
    if out.numel():
        grid = (len(x), ceil_div(width, _BLOCK))
        up_stride = 0 if up is None else up.stride(0)
        _activation[grid](
            x, up, out, x.stride(0), up_stride, width, FUNCTION=function, GATED=up is not None, IS_ONE=x.shape[1] < width, BLOCK=_BLOCK,
            num_warps=4, **launch_options(x.device),
        )
    return out


@triton.jit
def _activation(
    x_ptr, up_ptr, out_ptr, x_stride, up_stride, width,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, IS_ONE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):
    await_inputs(EARLY)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = token * x_stride + (column * 0 if IS_ONE else column)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        # what the reference rounds between its two operations stays in float32
        y = gated_of(x, tl.load(up_ptr + token * up_stride + column, mask=inside, other=0.0).to(tl.float32), FUNCTION)
    else:
        y = function_of(x, FUNCTION)
    tl.store(out_ptr + token * width + column, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gated_of(gate, up, FUNCTION: tl.constexpr):
    """Both in float32. See ops.Activation."""
    if FUNCTION == "clamped_swiglu":
        gate = tl.where(gate > 7.0, 7.0, gate)  # a NaN stays one
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        y = gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    else:
        y = function_of(gate, FUNCTION) * up
    return y


@triton.jit
def function_of(x, FUNCTION: tl.constexpr):
    """x in float32."""
    if FUNCTION == "":
        y = x
    elif FUNCTION == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif FUNCTION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif FUNCTION == "gelu_tanh":
        # x * (1 + tanh(u)) / 2 = x / (1 + exp(-2 u))
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif FUNCTION == "sigmoid":
        y = 1.0 / (1.0 + tl.exp(-x))
    elif FUNCTION == "relu2":
        y = tl.maximum(x, 0.0)
        y *= y
    else:
        tl.static_assert(FUNCTION == "relu", "an unknown activation")
        y = tl.maximum(x, 0.0)
    return y
