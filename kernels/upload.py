"""Numbers on their way from the host to a device, which nobody waits for: neither the host nor what the device has still to do.

They go in a stream of their own. In the one that computes, an engine that copies and one that computes would wait for each other, for
several times as long as the numbers take. Knows nothing of what they are for.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16
"""Bytes. What is packed begins at multiples of it: wide loads want that, and Triton compiles a kernel anew for pointers that do not."""


def upload(values: Tensor, device: torch.device) -> Tensor:
    """On the device, for all of its later work; the same tensor if it is there."""
    if values.device == device:
        return values
    if device.type != "cuda":
        return values.to(device)
    return _sent(values.pin_memory(), device) if values.numel() else torch.empty_like(values, device=device)


def upload_packed(values: Sequence[Tensor | NDArray[Any]], device: torch.device) -> list[Tensor]:
    """`upload` for many, none of which need be contiguous: one copy for all."""
    parts = [value if isinstance(value, Tensor) else torch.from_numpy(np.ascontiguousarray(value)) for value in values]
    sizes = [part.numel() * part.itemsize for part in parts]
    starts = [*accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0)]
    spans = [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
    packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for part, span in zip(parts, spans, strict=True):
        packed[span].view(part.dtype).copy_(part.flatten())
    there = _sent(packed, device) if device.type == "cuda" else packed.to(device)
    return [there[span].view(part.dtype).view(part.shape) for part, span in zip(parts, spans, strict=True)]


def _sent(pinned: Tensor, device: torch.device) -> Tensor:
    computing, beside = torch.cuda.current_stream(device), _stream(device)
    with torch.cuda.stream(beside):
        there = pinned.to(device, non_blocking=True)
    computing.wait_stream(beside)
    there.record_stream(computing)
    return there


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
