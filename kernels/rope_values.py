"""Sines and cosines of a rotary table, for every executor."""

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
