"""What of the time a device was busy, from what a profiler says of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretoken.engine.bench import gpu_profile
from foretoken.engine.bench.gpu_profile import profiled


def test_spans_that_overlap_count_once_and_the_host_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [("DeviceType.CUDA", 5, 6, "norm"), ("DeviceType.CUDA", 0, 3, "product")]
    spans += [("DeviceType.CPU", 0, 50, "launch"), ("DeviceType.CUDA", 1, 2, "norm"), ("DeviceType.CUDA", 2, 4, "product")]
    events = [SimpleNamespace(device_type=kind, time_range=SimpleNamespace(start=a, end=b), name=name) for kind, a, b, name in spans]

    class Seen:
        def __init__(self, **settings: Any) -> None: ...
        def __enter__(self) -> Seen:
            return self

        def __exit__(self, *error: object) -> None: ...
        def events(self) -> list[SimpleNamespace]:
            return events

    monkeypatch.setattr(gpu_profile.torch.profiler, "profile", Seen)
    calls: list[int] = []
    found = profiled(lambda: calls.append(1), 3, torch.device("cpu"))
    assert found is not None and (found.busy_us, found.whole_us, len(found.spans), len(calls)) == (5, 6, 4, 3)
    assert found.longest(1) == [("product", 5, 2)]


def test_a_cpu_is_no_device() -> None:
    assert profiled(lambda: torch.ones(3) + 1, 2, torch.device("cpu")) is None
