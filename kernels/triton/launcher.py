"""Kernels that the host launches between passes, in a fraction of the time that Triton's own launch takes.

That asks each time which build fits the arguments; here their kinds say so. Inside a pass, which is a recorded graph, nobody waits for
launches.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor


class Launcher:
    """A kernel and its constants. What is built follows from the kinds of all other arguments."""

    asks_triton: ClassVar[bool] = False  # for every launch of every kernel

    def __init__(self, kernel: Any, num_warps: int, **constants: int) -> None:
        """constants: the last parameters, in their order."""
        self._kernel = kernel
        self._constants = constants
        params = getattr(kernel, "params", ())  # the interpreter's kernels have none
        self._is_special = [not param.do_not_specialize for param in params if not param.is_constexpr]
        self._num_warps = num_warps
        self._built: dict[tuple[object, ...], Any] = {}

    def __call__(self, device: torch.device, grid: tuple[int, ...], *args: Tensor | int | None) -> None:
        """args: all other parameters. Pinned memory of the host is as good as the device's."""
        if self.asks_triton or device.type != "cuda":  # the interpreter's, or only built
            self._launched(grid, args)
            return
        key = torch.cuda.current_device(), *map(_kind, args, self._is_special)
        built = self._built.get(key)
        if built is None:
            self._built[key] = self._launched(grid, args)
        else:
            built[(*grid, 1, 1)[:3]](*args, *self._constants.values())

    def _launched(self, grid: tuple[int, ...], args: tuple[Tensor | int | None, ...]) -> Any:
        return self._kernel[grid](*args, **self._constants, num_warps=self._num_warps)


def _kind(arg: Tensor | int | None, is_special: bool) -> object:
    """What Triton distinguishes: types, aligned pointers, and, of numbers that it may build for, 1 and those divisible by 16."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if arg is None:
        return None
    is_narrow = -(1 << 31) <= arg < 1 << 31
    return (is_narrow, arg == 1, arg % 16 == 0) if is_special else is_narrow
