"""The noise of noise.py made where the scores are: torch on any device, so that drawing needs no word from the host.

Gives the same values as noise.py (32-bit arithmetic in 64-bit integers); that one is quicker on a CPU.
"""

import torch
from torch import Tensor

from .noise import BLOCK

_MASK = (1 << 32) - 1


def exponential(keys: Tensor, n: int) -> Tensor:
    """[N, n] float32 ~ Exp(1) under keys [N] int64; see `noise.exponential`."""
    increment = ((keys >> 32) & _MASK | 1)[:, None]
    x = torch.arange(n, device=keys.device) * increment + (keys & _MASK)[:, None] & _MASK
    x = x ^ x >> 16
    x = x * 0x7FEB352D & _MASK
    x = x ^ x >> 15
    x = x * 0x846CA68B & _MASK  # the product may wrap: its low half stays right
    x = x ^ x >> 16
    return (-torch.log1p(-((x.double() + 0.5) * 2.0**-32))).float()


def draw(weights: Tensor, keys: Tensor) -> Tensor:
    """Token ids [N] int64 by weights [N, V] under keys [N] int64 on the same device; see `noise.draw`."""
    if surplus := -weights.shape[-1] % BLOCK:
        weights = torch.nn.functional.pad(weights, (0, surplus))
    blocks = weights.view(len(weights), -1, BLOCK)
    noise = exponential(keys, BLOCK + blocks.shape[1]).to(weights)
    block = (blocks.sum(-1) / noise[:, BLOCK:]).argmax(-1)
    within = blocks.gather(1, block[:, None, None].expand(-1, 1, BLOCK))[:, 0] / noise[:, :BLOCK]
    return (block * BLOCK + within.argmax(-1)).clamp(max=weights.shape[-1] - 1)
