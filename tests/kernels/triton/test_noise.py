from __future__ import annotations

import torch
from triton_interpreter import DEVICE

from foretoken.kernels import noise
from foretoken.kernels.triton.noise import exponential


def test_every_bit_of_the_noise_is_that_of_the_host():
    keys = noise.keys([noise.stream(seed, seed % 3) for seed in range(12)], range(0, 1200, 100))
    keys[:3] = torch.tensor([0, -1, 1 << 62])
    assert torch.equal(exponential(keys.to(DEVICE), 3001).cpu(), noise.exponential(keys, 3001))
