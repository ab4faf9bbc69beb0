"""Numbers on their way from the host to a device, which nobody waits for. Knows nothing of what they are for."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes. What is packed begins at multiples of it: Triton compiles a kernel anew for pointers that are not."""


def upload(values: Tensor, device: torch.device) -> Tensor:
    """On the device, in the order of its work; the same tensor if it is there."""
    if values.device == device:
        return values
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


def upload_packed(values: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """`upload` for many, none of which need be contiguous: one copy for all of a dtype."""
    found: dict[str, Tensor] = {}
    for dtype in {value.dtype for value in values.values()}:
        some = {name: value for name, value in values.items() if value.dtype == dtype}
        step = ALIGNMENT // dtype.itemsize
        starts = [*accumulate((-(-value.numel() // step) * step for value in some.values()), initial=0)]
        packed = torch.empty(starts[-1], dtype=dtype, pin_memory=device.type == "cuda")
        for start, value in zip(starts, some.values(), strict=False):
            packed[start : start + value.numel()] = value.flatten()
        there = packed.to(device, non_blocking=True)
        for start, (name, value) in zip(starts, some.items(), strict=False):
            found[name] = there[start : start + value.numel()].view(value.shape)
    return found
