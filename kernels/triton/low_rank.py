"""What rows' adapters add to a product in Triton: two launches for a few tokens, each of which reads its own adapter and no other.

Of many tokens that would read an adapter many times: there AdapterBank's products of all slots together are faster.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..adapters import Factors
from .early_launch import await_inputs, launch_options
from .launch import ceil_div, power_of_two

MOST_TOKENS, MOST_WEIGHTS = 64, 3
"""Of one product."""

_RANKS, _INPUTS, _OUTPUTS = 4, 512, 256


def low_rank(x: Tensor, factors: Factors, slots: Tensor, residual: Tensor | None) -> Tensor:
    """(x @ down.T) @ up [+ residual] of x [T, in], by the adapter in slots [T] int32 of each token, 0 = none. Nobody waits.

    T and the weights of the product are MOST_TOKENS and MOST_WEIGHTS at most.
    """
    tokens, width = x.shape
    num_weights, num_slots, rank, _ = factors.down.shape
    outs = [up.shape[-1] for up in factors.ups]
    result = torch.empty(tokens, sum(outs), dtype=x.dtype, device=x.device)
    inner = torch.empty(tokens, num_weights, rank, dtype=torch.float32, device=x.device)
    options = launch_options(x.device)
    _inner[(tokens, ceil_div(rank, _RANKS), num_weights)](
        x, factors.down, slots, inner, x.stride(0), width, rank, num_slots, num_weights, RANKS=_RANKS, BLOCK=_INPUTS, num_warps=4, **options
    )
    missing = MOST_WEIGHTS - num_weights
    _outer[(tokens, ceil_div(max(outs), _OUTPUTS), num_weights)](
        inner, *factors.ups, *factors.ups[:1] * missing, slots, residual, result, *outs, *[0] * missing, sum(outs), rank, num_weights,
        HAS_RESIDUAL=residual is not None, RANKS=min(power_of_two(rank), 16), BLOCK=_OUTPUTS, num_warps=4, **options,
    )
    return result


@triton.jit
def _inner(
    x_ptr, down_ptr, slots_ptr, inner_ptr, x_stride, width, rank, num_slots, num_weights,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):
    await_inputs(EARLY)
    token, weight = tl.program_id(0).to(tl.int64), tl.program_id(2)
    slot = tl.load(slots_ptr + token)
    if slot == 0:
        return
    which = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    rows = ((weight * num_slots + slot - 1).to(tl.int64) * rank + which) * width
    sums = tl.zeros((RANKS, BLOCK), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        x = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        down = tl.load(down_ptr + rows[:, None] + column, mask=(which < rank)[:, None] & inside, other=0.0).to(tl.float32)
        sums += down * x
    tl.store(inner_ptr + (token * num_weights + weight) * rank + which, tl.sum(sums, 1), mask=which < rank)


@triton.jit
def _outer(
    inner_ptr, up0_ptr, up1_ptr, up2_ptr, slots_ptr, residual_ptr, result_ptr, out0, out1, out2, total, rank, num_weights,
    HAS_RESIDUAL: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):
    await_inputs(EARLY)
    token, weight = tl.program_id(0).to(tl.int64), tl.program_id(2)
    slot = tl.load(slots_ptr + token)
    up_ptr, out, first = up0_ptr, out0, 0
    if weight == 1:
        up_ptr, out, first = up1_ptr, out1, out0
    if weight == 2:
        up_ptr, out, first = up2_ptr, out2, out0 + out1
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < out
    place = token * total + first + column
    added = tl.zeros((BLOCK,), dtype=tl.float32)
    if slot != 0:
        for start in range(0, rank, RANKS):
            which = start + tl.arange(0, RANKS)
            inner = tl.load(inner_ptr + (token * num_weights + weight) * rank + which, mask=which < rank, other=0.0)
            rows = ((slot - 1).to(tl.int64) * rank + which) * out
            up = tl.load(up_ptr + rows[:, None] + column, mask=(which < rank)[:, None] & inside, other=0.0).to(tl.float32)
            added += tl.sum(up * inner[:, None], 0)
    if HAS_RESIDUAL:
        added += tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(result_ptr + place, added.to(result_ptr.dtype.element_ty), mask=inside)
