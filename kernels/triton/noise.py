"""The counter-based noise of kernels/noise.py inside Triton kernels: the same integers and logarithm, so the same bits."""

from __future__ import annotations

import triton
import triton.language as tl


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
