"""Numbers on their way from the host to a device, which nobody waits for. Knows nothing of what they are for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16
"""Bytes. What is packed begins at multiples of it: wide loads want that, and Triton compiles a kernel anew for pointers that do not."""


def upload(values: Tensor, device: torch.device) -> Tensor:
    """On the device, in the order of its work; the same tensor if it is there."""
    if values.device == device:
        return values
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


def upload_packed(values: Sequence[Tensor | NDArray[Any]], device: torch.device) -> list[Tensor]:
    """`upload` for many, none of which need be contiguous: one copy for all of a dtype."""
    parts = [value if isinstance(value, Tensor) else torch.from_numpy(np.ascontiguousarray(value)) for value in values]
    moved: dict[int, Tensor] = {}
    for dtype in {part.dtype for part in parts}:
        places = [place for place, part in enumerate(parts) if part.dtype == dtype]
        step = ALIGNMENT // dtype.itemsize
        starts = [*accumulate((-(-parts[place].numel() // step) * step for place in places), initial=0)]
        packed = torch.empty(starts[-1], dtype=dtype, pin_memory=device.type == "cuda")
        spans = [(place, start, start + parts[place].numel()) for place, start in zip(places, starts, strict=False)]
        for place, start, end in spans:
            packed[start:end] = parts[place].flatten()
        there = packed.to(device, non_blocking=True)
        moved |= {place: there[start:end].view(parts[place].shape) for place, start, end in spans}
    return [moved[place] for place in range(len(parts))]
