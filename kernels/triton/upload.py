"""Arrays of the host on the device: all of a type in one copy from pinned memory, which nobody waits for."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(arrays: list[NDArray[np.int32]] | list[NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """The arrays, all of one type, on the device; each begins at a multiple of 16 bytes, as wide loads want it."""
    unit = 16 // arrays[0].itemsize
    sizes = [-(-array.size // unit) * unit for array in arrays]
    host = torch.empty(sum(sizes), dtype=torch.int32 if unit == 4 else torch.int64, pin_memory=device.type == "cuda")
    parts = host.split(sizes)
    for part, array in zip(parts, arrays, strict=True):
        part[: array.size] = torch.from_numpy(np.ascontiguousarray(array).reshape(-1))
    moved = host.to(device, non_blocking=True).split(sizes)
    return [part[: array.size].view(array.shape) for part, array in zip(moved, arrays, strict=True)]
