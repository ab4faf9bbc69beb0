"""4-bit weights for GPUs, a scale for every 32 inputs: the number format, how weights become it, and a reference of its products.

The format is the native executor's (native/quantise.cpp), so what it costs in quality is the same there and here; only the order
in memory is a GPU's. Knows no program and no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32
"""Inputs that share a scale."""

TILE = 4 * GROUP
"""Inputs whose weights lie together: 64 bytes of nibbles and 4 group scales for each output."""

_SMALLEST = 1e-30  # a row of less is zeros: dividing by its scale would overflow
_SLICE = 2**22  # weights made narrow at a time: what that takes beside them stays small


@dataclass(frozen=True)
class Int4Matrix:
    """A weight [out, in] as weight[o, i] = scales[o] * group_scale[o, i // 32] * (nibble[o, i] - 8), group scales 1..16.

    Inputs are padded with zeros to whole tiles. group_scale * (nibble - 8) is an integer that bfloat16 holds exactly.
    """

    words: Tensor  # [tiles, out, 16] int32, two halves each: input 32 g + i of a tile in bits 4 g to 4 g + 3 of half i
    group_scales: Tensor  # [tiles, out] int32: that of group g in bits 8 g to 8 g + 7
    scales: Tensor  # [out] float32
    depth: int  # inputs, without padding

    @classmethod
    def of(cls, weight: Tensor) -> Int4Matrix:
        """weight [out, in] of any floating dtype; what is made lies on its device. A row that is not finite becomes NaN."""
        outputs, depth = weight.shape
        tiles = -(-depth // TILE)
        matrix = cls(
            torch.empty(tiles, outputs, GROUP // 2, dtype=torch.int32, device=weight.device),
            torch.empty(tiles, outputs, dtype=torch.int32, device=weight.device),
            torch.empty(outputs, dtype=torch.float32, device=weight.device),
            depth,
        )
        step = max(_SLICE // (tiles * TILE), 1)
        for start in range(0, outputs, step):
            rows = F.pad(weight[start : start + step].float(), (0, tiles * TILE - depth)).contiguous()
            integers, group_scales, scales = _quantised(rows.view(len(rows), -1, GROUP))
            shape, part = (len(rows), tiles, TILE // GROUP), slice(start, start + step)
            matrix.words[:, part] = _packed((integers + 8).view(*shape, GROUP), 4).to(torch.int16).view(torch.int32).transpose(0, 1)
            matrix.group_scales[:, part] = _packed(group_scales.view(shape), 8).t()
            matrix.scales[part] = scales
        return matrix

    @staticmethod
    def num_bytes(shape: tuple[int, ...]) -> int:
        """That a weight [out, in] takes."""
        outputs, depth = shape
        return outputs * (-(-depth // TILE) * (TILE // 2 + 4) + 4)

    @property
    def num_outputs(self) -> int:
        return len(self.scales)

    def weight(self) -> Tensor:
        """[out, in] float32, as every product means it."""
        integers = _unpacked(self.words.view(torch.int16), 4).float() - 8  # [tiles, out, 4, 32]
        groups = integers * _unpacked(self.group_scales, 8)[..., None]
        return (groups.transpose(0, 1).flatten(1)[:, : self.depth] * self.scales[:, None]).contiguous()


def _packed(values: Tensor, bits: int) -> Tensor:
    """values [n, tiles, 4, ...], small integers of any type -> [n, tiles, ...] int32, the four side by side in its lowest bits."""
    parts = values.to(torch.int32).unbind(2)
    return parts[0] | parts[1] << bits | parts[2] << 2 * bits | parts[3] << 3 * bits


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """words [tiles, n, ...] -> [tiles, n, 4, ...], the other way round."""
    return torch.stack([words >> bits * group & (1 << bits) - 1 for group in range(4)], 2)


def _quantised(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """groups [n, G, 32] float32 -> integers of -8..7, the same shape; group scales [n, G] of 1..16; scales [n].

    A row's scale is at first a sixteenth of the step of its widest group; a group's is the multiple of that with the least squared
    error, from what clips nothing down to where clipping costs more than finer steps gain; then the scale is that of least squares.
    """
    # 1. Steps that clip nothing: the outermost values round inwards.
    widest = torch.maximum(groups.amax(-1) / 7.5, groups.amin(-1) / -8.5).clamp(min=0)
    scale = widest.amax(-1, keepdim=True) / 16
    is_zero = groups.abs().amax((-2, -1)) <= _SMALLEST
    ratio = torch.where(is_zero[:, None], 1.0, widest / scale)

    # 2. The groups' scales. No range of candidates is longer than 7.
    most, least = ratio.ceil().clamp(1, 16), (0.7 * ratio).floor().clamp(min=1)
    best, least_error = most, torch.full_like(most, torch.inf)
    for below in range(7):
        candidate = (most - below).clamp(min=1)
        step = (scale * candidate)[..., None]
        error = (groups - _nearest(groups, step) * step).square().sum(-1)
        better = (error < least_error) & (candidate >= least)
        best, least_error = torch.where(better, candidate, best), torch.where(better, error, least_error)

    # 3. The integers, and with them fixed the scale.
    integers = _nearest(groups, (scale * best)[..., None])
    products = (best * (groups * integers).sum(-1)).sum(-1)
    squares = (best.square() * integers.square().sum(-1)).sum(-1)
    scales = torch.where(is_zero, 0.0, torch.where(squares == 0, scale[:, 0], products / squares))
    integers = torch.where(is_zero[:, None, None], 0.0, integers)
    return integers.nan_to_num(), torch.where(is_zero[:, None], 1.0, best).nan_to_num(1.0), scales


def _nearest(values: Tensor, step: Tensor) -> Tensor:
    return (values * step.reciprocal()).clamp(-8, 7).round()
