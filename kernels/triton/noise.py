"""The counter-based noise of kernels/noise.py inside Triton kernels: the same integers and logarithm, so the same bits."""

# numbers are passed where constexpr is declared
# pyright: reportArgumentType=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import ceil_div

_BLOCK = 512


def exponential(keys: Tensor, n: int) -> Tensor:
    """[N, n] float32 ~ Exp(1) under keys [N] int64, on their device; see `kernels.noise.exponential`."""
    out = torch.empty(len(keys), n, dtype=torch.float32, device=keys.device)
    if out.numel():
        _fill[(len(keys), ceil_div(n, _BLOCK))](keys, out, n, BLOCK=_BLOCK)
    return out


@triton.jit
def _fill(keys_ptr, out_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + row * n + column, exponential_at(tl.load(keys_ptr + row), column), mask=column < n)


@triton.jit
def exponential_at(key, column):
    """Entries `column` (int32, any shape) of the noise under `key` (int64)."""
    z = key.to(tl.uint64, bitcast=True)
    increment = (z >> 32).to(tl.uint32) | 1
    x = column.to(tl.uint32) * increment + z.to(tl.uint32)
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    x = x ^ (x >> 16)
    # 1 - u with u = (x + 0.5) / 2^32, which float64 holds exactly
    return (-tl.log(1.0 - (x.to(tl.float64) + 0.5) * 2.3283064365386963e-10)).to(tl.float32)
