"""Sizes that all launches share: powers of two, warps, programs that fill a GPU. Results depend on shapes only."""

from __future__ import annotations

from functools import cache

import torch

MULTIPROCESSORS = 132
"""Of an H100 or H200. A constant, so that how work is cut, and with it every bit of the results, is the same on all machines."""


SHARED_BYTES = 227 * 1024
"""That a program may have there."""


@cache
def shared_bytes(device: torch.device) -> int:
    """That a program may have on this device: 99 KiB on GPUs for desktops, where results must not change for that."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else SHARED_BYTES


def power_of_two(n: int, at_least: int = 1) -> int:
    """The smallest power of two that is no less than n and at_least."""
    return 1 << (max(n, at_least) - 1).bit_length()


def ceil_div(n: int, size: int) -> int:
    return -(-n // size)


def warps_for(elements: int) -> int:
    """Warps of a program that handles a vector of this many elements: 8 a thread, 16 bytes of bfloat16."""
    return min(max(elements // 256, 1), 16)
