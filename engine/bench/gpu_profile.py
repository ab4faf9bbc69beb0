"""What a device does while work is handed to it, and how busy it is, by torch's profiler. Knows no engine and no figure."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .gpu_clock import synchronize


@dataclass(frozen=True)
class Span:
    """A kernel or a copy. Microseconds."""

    start: float
    end: float
    name: str


@dataclass(frozen=True)
class Profiled:
    """What the device did. Microseconds."""

    busy_us: float  # covered by anything
    whole_us: float  # from the first to the last
    spans: Sequence[Span]  # in the order of their starts

    def longest(self, count: int) -> list[tuple[str, float, int]]:
        """The kernels that took most: name, microseconds of all its launches (which may run beside others), how many."""
        took: dict[str, list[float]] = defaultdict(list)
        for span in self.spans:
            took[span.name].append(span.end - span.start)
        found = [(name, sum(each), len(each)) for name, each in took.items()]
        return sorted(found, key=lambda one: one[1], reverse=True)[:count]


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
    return Profiled(*_busy(spans), spans) if spans else None


def _device_spans(found: torch.profiler.profile) -> list[Span]:
    """Everything that ran on the device."""
    spans: list[Span] = []
    for event in found.events() or []:
        if "cuda" in str(getattr(event, "device_type", "")).lower():
            spans.append(Span(event.time_range.start, event.time_range.end, event.name))
    return sorted(spans, key=lambda span: span.start)


def _busy(spans: Sequence[Span]) -> tuple[float, float]:
    """Time covered by any span, and from the first to the last."""
    covered, reached = 0.0, spans[0].start
    for span in spans:
        covered += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return covered, reached - spans[0].start
