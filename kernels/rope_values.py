"""Sines and cosines of a rotary table, and by what its queries grow, for every executor."""

from __future__ import annotations

import torch
from torch import Tensor

from .program import RopeTable


def rope_table_values(
    rope: RopeTable, length: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Tensor:
    """[length, 2 n]: cosines, then sines, of n frequencies at each position."""
    frequencies = torch.tensor(rope.inv_freq, dtype=torch.float32, device=device)
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * frequencies
    return (torch.cat((angles.cos(), angles.sin()), -1) * rope.attention_factor).to(dtype)


def query_growth(rope: RopeTable, length: int, device: torch.device | str = "cpu") -> Tensor | None:
    """[length] float32: what queries at each position are multiplied by; None = 1 everywhere."""
    if rope.growth is None:
        return None
    beta, step = rope.growth
    return 1.0 + beta * torch.log1p((torch.arange(length, device=device) // step).float())
