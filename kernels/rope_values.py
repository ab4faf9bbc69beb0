"""Sines and cosines of a rotary table, and by what its queries grow, for every executor; and the rotation itself in torch."""

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


def rotation_at(table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos | cos and -sin | sin, [T, 1, 2 n] each: gathered once, used by every layer."""
    cos, sin = table.index_select(0, positions)[:, None].chunk(2, -1)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of heads [T, heads, dim]: x1 | x2 -> x1 cos - x2 sin | x2 cos + x1 sin. What cos lacks in width stays."""
    width = cos.shape[-1]
    if width < heads.shape[-1]:
        return torch.cat((rotated(heads[..., :width], cos, sin), heads[..., width:]), -1)
    return torch.addcmul(heads * cos, heads.roll(width // 2, -1), sin)
