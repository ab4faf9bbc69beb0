"""Numbers on their way from the host to a device, which nobody waits for: neither the host nor what the device has still to do.

They go in a stream of their own. In the one that computes, an engine that copies and one that computes would wait for each other, for
several times as long as the numbers take. Knows nothing of what they are for.
"""

from __future__ import annotations

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
    parts = [np.asarray(value, order="C") for value in values]  # of tensors too; numpy packs small ones in a fraction of torch's time
    starts = [*accumulate((-(-part.nbytes // ALIGNMENT) * ALIGNMENT for part in parts), initial=0)]
    packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    memory = packed.numpy()
    for part, start in zip(parts, starts, strict=False):
        memory[start : start + part.nbytes] = part.reshape(-1).view(np.uint8)
    there = _sent(packed, device) if device.type == "cuda" else packed.to(device)
    return [
        there[start : start + part.nbytes].view(_dtype(part.dtype)).view(part.shape) for part, start in zip(parts, starts, strict=False)
    ]


@cache
def _dtype(kind: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.zeros(0, kind)).dtype


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
