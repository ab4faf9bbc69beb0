"""Host memory that a GPU's kernels read and write where it lies: few numbers that one launch reads, and few that it says.

A copy would be a piece of work of its own in a stream of its own, with marks at which the streams wait for each other: to hand that
over takes the host several times as long as the launch. Memory is used in turn, by all engines of the process, and not again before
the launch has ended. Knows nothing of what the numbers are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import accumulate, cycle

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .upload import upload

SLOTS = 128
"""A step uses about five; what it says is read before the step behind the next one is handed over."""

SLOT_NUMBERS = 1 << 14
"""int32, at first. A slot grows with what it has to hold."""

MOST_NUMBERS = 1 << 16
"""That are lent in place. More, as the block tables of many long texts have, are copied: that takes longer than to hand a copy over, and
pinned memory of so many slots would be gigabytes."""


class Slot:
    """Memory of one launch at a time."""

    def __init__(self, device: torch.device, is_in_place: bool) -> None:
        """is_in_place: whether kernels of the device reach the host's memory; if not, it is copied there and back."""
        self._device, self._is_in_place = device, is_in_place
        self._ended = torch.cuda.Event() if device.type == "cuda" else None
        self._turn = 0
        self._hold(SLOT_NUMBERS)

    def take(self, count: int) -> None:
        """From now on it is another launch's: wait until the one before has ended, which it mostly has long ago."""
        self.wait()
        self._turn += 1
        if count > len(self.array):
            self._hold(1 << (count - 1).bit_length())

    def put(self, arrays: Sequence[NDArray[np.int32]]) -> list[int]:
        """For the launch to read. Where each begins."""
        starts = _starts(arrays)
        for array, start in zip(arrays, starts, strict=True):
            self.array[start : start + array.size] = array.ravel()
        if not self._is_in_place:
            self.numbers.copy_(self._host, non_blocking=True)
        return starts

    def sent(self) -> None:
        """The launch is under way."""
        if not self._is_in_place:
            self._host.copy_(self.numbers, non_blocking=True)
        if self._ended is not None:
            self._ended.record()

    def wait(self) -> None:
        if self._ended is not None:
            self._ended.synchronize()

    def said(self, *shape: int) -> Said:
        """What the launch leaves in front, of this shape."""
        return Said(self, self._turn, shape)

    def is_at(self, turn: int) -> bool:
        return self._turn == turn

    @torch.inference_mode(False)  # what is made there could not be written outside
    def _hold(self, count: int) -> None:
        self._host = torch.zeros(count, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        self.array = self._host.numpy()
        self.numbers = self._host if self._is_in_place else torch.zeros(count, dtype=torch.int32, device=self._device)


class Said:
    """Numbers that a launch leaves in its slot."""

    def __init__(self, slot: Slot, turn: int, shape: tuple[int, ...]) -> None:
        self._slot, self._turn, self._shape = slot, turn, shape

    def get(self) -> Tensor:
        """int32, on the host. Waits for the launch, and for nothing that was begun later. Raises RuntimeError if others have its memory."""
        self._slot.wait()
        numbers = torch.tensor(self._slot.array[: int(np.prod(self._shape))].reshape(self._shape))
        if not self._slot.is_at(self._turn):
            raise RuntimeError("what a launch has said is read too late: others use its memory")
        return numbers


class HostMemory:
    """Slots of one device, used in turn."""

    def __init__(self, device: torch.device, num_slots: int = SLOTS, is_in_place: bool = True) -> None:
        self._device = device
        self._turns = cycle([Slot(device, is_in_place) for _ in range(num_slots)])  # whose step no other thread comes between

    def slot(self, count: int) -> Slot:
        """For one launch: room for so many int32 numbers."""
        slot = next(self._turns)
        slot.take(count)
        return slot

    @contextmanager
    def lent(self, *arrays: NDArray[np.int32]) -> Iterator[tuple[Tensor, list[int]]]:
        """All numbers in one tensor, and where each array begins there, for what is launched inside."""
        count = sum(array.size for array in arrays)
        if count > MOST_NUMBERS:
            flat = np.concatenate([array.ravel() for array in arrays])
            yield upload(torch.from_numpy(flat), self._device), _starts(arrays)
            return
        slot = self.slot(count)
        starts = slot.put(arrays)
        try:
            yield slot.numbers, starts
        finally:
            slot.sent()


def _starts(arrays: Sequence[NDArray[np.int32]]) -> list[int]:
    """Of each, one behind the other."""
    return [*accumulate((array.size for array in arrays[:-1]), initial=0)]


@cache
def host_memory(device: torch.device) -> HostMemory:
    """In place where that was found to work when it was first wanted."""
    if device.type != "cuda":
        return HostMemory(device)
    from .triton.echo import hears_its_echo  # Triton is there only where torch is built for GPUs

    return HostMemory(device, is_in_place=hears_its_echo(HostMemory(device, num_slots=2), device))
