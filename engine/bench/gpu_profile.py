"""How busy a device is while work is handed to it, by torch's profiler. Knows no engine and no figure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .gpu_clock import synchronize


@dataclass(frozen=True)
class Profiled:
    """What the device did. Microseconds."""

    busy_us: float  # covered by anything
    whole_us: float  # from the first to the last
    num_spans: int  # kernels and copies


def profiled(work: Callable[[], object], times: int, device: torch.device) -> Profiled | None:
    """Of so many calls one after the other; None if the profiler saw nothing of the device, as on a CPU."""
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CUDA] if device.type == "cuda" else [ProfilerActivity.CPU]
    synchronize(device)
    with torch.profiler.profile(activities=activities, acc_events=True) as found:  # which torch 2.11 warns of where nobody says
        for _ in range(times):
            work()
        synchronize(device)
    spans = _device_spans(found)
    return Profiled(*_busy(spans), len(spans)) if spans else None


def _device_spans(found: torch.profiler.profile) -> list[tuple[float, float]]:
    """(start, end) in microseconds of everything that ran on the device."""
    spans: list[tuple[float, float]] = []
    for event in found.events() or []:
        if "cuda" in str(getattr(event, "device_type", "")).lower():
            spans.append((event.time_range.start, event.time_range.end))
    return sorted(spans)


def _busy(spans: list[tuple[float, float]]) -> tuple[float, float]:
    """Time covered by any span, and from the first to the last."""
    covered, reached = 0.0, spans[0][0]
    for start, end in spans:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered, reached - spans[0][0]
