"""Graphs where there is no GPU, for tests of when something is recorded and of what a replay reads and leaves."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from foretoken.kernels.graphs import CaptureReport

T = TypeVar("T")


class FakeRecorder:
    """A replay does the work again and leaves the results where the recording left its own. Implements `Recorder`."""

    def __init__(self) -> None:
        self.captured = CaptureReport()
        self.num_replays = 0

    def record(self, work: Callable[[], T]) -> tuple[Callable[[], object], T]:
        with torch.inference_mode():
            result = work()
        self.captured += CaptureReport(1)

        def replay() -> None:
            self.num_replays += 1
            _overwrite(result, work())

        return replay, result


def _overwrite(old: Any, new: Any) -> None:
    if isinstance(old, Tensor):
        old.copy_(new)
    elif isinstance(old, dict):
        for key in old:
            _overwrite(old[key], new[key])
    elif isinstance(old, list):
        for one, other in zip(old, new, strict=True):
            _overwrite(one, other)
    elif dataclasses.is_dataclass(old):
        for field in dataclasses.fields(old):
            _overwrite(getattr(old, field.name), getattr(new, field.name))
