"""What of the time a device was busy, from what a profiler says of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretoken.engine.bench import gpu_profile
from foretoken.engine.bench.gpu_profile import Profiled, profiled


def test_spans_that_overlap_count_once_and_the_host_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [("DeviceType.CUDA", 5, 6), ("DeviceType.CUDA", 0, 3)]
    spans += [("DeviceType.CPU", 0, 50), ("DeviceType.CUDA", 1, 2), ("DeviceType.CUDA", 2, 4)]
    events = [SimpleNamespace(device_type=kind, time_range=SimpleNamespace(start=start, end=end)) for kind, start, end in spans]

    class Seen:
        def __init__(self, **settings: Any) -> None: ...
        def __enter__(self) -> Seen:
            return self

        def __exit__(self, *error: object) -> None: ...
        def events(self) -> list[SimpleNamespace]:
            return events

    monkeypatch.setattr(gpu_profile.torch.profiler, "profile", Seen)
    calls: list[int] = []
    assert profiled(lambda: calls.append(1), 3, torch.device("cpu")) == Profiled(5, 6, 4) and len(calls) == 3


def test_a_cpu_is_no_device() -> None:
    assert profiled(lambda: torch.ones(3) + 1, 2, torch.device("cpu")) is None
