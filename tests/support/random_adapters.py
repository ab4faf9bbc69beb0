"""Adapters with random factors, and what a network would be with one merged into its weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from foretoken.kernels.adapters import AdapterBank

Pairs = dict[str, tuple[Tensor, Tensor]]


def random_pairs(bank: AdapterBank, seed: int, rank: int | None = None, weights: str = "") -> Pairs:
    """For all weights of the bank whose names contain `weights`: down [rank, in], up [out, rank], about as great as the weights."""
    generator, size = torch.Generator().manual_seed(seed), bank.rank if rank is None else rank
    chosen = {name: shape for name, shape in bank.shapes.items() if weights in name}
    return {
        name: (torch.randn(size, width, generator=generator) * width**-0.5, torch.randn(out, size, generator=generator) * size**-0.5)
        for name, (out, width) in chosen.items()
    }


def merged(weights: Mapping[str, Tensor], pairs: Pairs) -> dict[str, Tensor]:
    """The weights with an adapter in them."""
    return {name: weight + pairs[name][1] @ pairs[name][0] if name in pairs else weight for name, weight in weights.items()}
