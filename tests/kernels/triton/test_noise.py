import torch
from probing_kernels import noise_under
from triton_interpreter import DEVICE

from foretoken.kernels import noise


def test_every_bit_of_the_noise_is_that_of_the_host():
    keys = noise.keys([noise.stream(seed, seed % 3) for seed in range(12)], range(0, 1200, 100))
    keys[:3] = torch.tensor([0, -1, 1 << 62])
    found = torch.empty(len(keys), 3001, device=DEVICE)
    noise_under[(len(keys), 6)](keys.to(DEVICE), found, 3001)
    assert torch.equal(found.cpu(), noise.exponential(keys, 3001))
