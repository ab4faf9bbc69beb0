from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton_interpreter import DEVICE

from foretoken.kernels import noise
from foretoken.kernels.triton.noise import exponential_at


@triton.jit
def _fill(keys_ptr: Any, out_ptr: Any, n: Any):
    row = tl.program_id(0)
    column = tl.program_id(1) * 512 + tl.arange(0, 512)
    tl.store(out_ptr + row * n + column, exponential_at(tl.load(keys_ptr + row), column), mask=column < n)


def test_every_bit_of_the_noise_is_that_of_the_host():
    keys = noise.keys([noise.stream(seed, seed % 3) for seed in range(12)], range(0, 1200, 100))
    keys[:3] = torch.tensor([0, -1, 1 << 62])
    found = torch.empty(len(keys), 3001, device=DEVICE)
    _fill[(len(keys), 6)](keys.to(DEVICE), found, 3001)
    assert torch.equal(found.cpu(), noise.exponential(keys, 3001))
