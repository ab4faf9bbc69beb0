"""Triton kernels that write out what functions of the real ones give: for tests, which alone launch them, and to be built without a GPU."""

import triton
import triton.language as tl

from foretoken.kernels.triton.noise import exponential_at
from foretoken.kernels.triton.sampling_limits import farthest_left


@triton.jit
def noise_under(keys_ptr, out_ptr, n):
    """Columns 0 to n - 1 of the noise, 512 a program."""
    row = tl.program_id(0)
    column = tl.program_id(1) * 512 + tl.arange(0, 512)
    tl.store(out_ptr + row * n + column, exponential_at(tl.load(keys_ptr + row), column), mask=column < n)


@triton.jit
def farthest(distances_ptr, masses_ptr, out_ptr, top_p_ptr, whole_ptr, vocab_size, blocks, BLOCK: tl.constexpr, BLOCKS_PAD: tl.constexpr):
    """What top_p alone lets be left of the blocks with these distances and masses."""
    block = tl.arange(0, BLOCKS_PAD)
    distances = tl.load(distances_ptr + block, mask=block < blocks, other=float("inf")).to(tl.int32, bitcast=True)
    masses = tl.load(masses_ptr + block, mask=block < blocks, other=0.0)
    top_p, whole = tl.load(top_p_ptr), tl.load(whole_ptr)
    no_min_p = tl.full((), float("-inf"), tl.float32)
    found = farthest_left(distances, masses, vocab_size, top_p, no_min_p, whole, vocab_size, blocks, BLOCK)
    tl.store(out_ptr, found.to(tl.float32, bitcast=True))
