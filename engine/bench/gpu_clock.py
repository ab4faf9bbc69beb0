"""Time on a device that works on its own: seconds between two marks in its stream, and what it can move and multiply.

Knows no network. On a CPU the same functions read the host's clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

COPY_BYTES = 2 << 30
PRODUCT = 8192
WARM_UP = 3  # runs that are not measured
COPIES = 10  # in a graph


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_seconds(work: Callable[[], object], device: torch.device, runs: int) -> float:
    """The middle of some runs, each from its first to its last piece of work on the device."""
    for _ in range(WARM_UP):
        work()
    if device.type != "cuda":
        return statistics.median(wall_seconds(work, device) for _ in range(runs))
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
    for first, last in marks:
        first.record()
        work()
        last.record()
    torch.cuda.synchronize(device)
    return statistics.median(first.elapsed_time(last) for first, last in marks) / 1e3


def graph_seconds(work: Callable[[], object], device: torch.device, runs: int) -> float:
    """As device_seconds, of one of COPIES in a graph: without the time that launches take."""
    if device.type != "cuda":
        return device_seconds(work, device, runs)
    work()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(COPIES):
            work()
    return device_seconds(graph.replay, device, runs) / COPIES


def wall_seconds(work: Callable[[], object], device: torch.device) -> float:
    """By the host's clock, until the device is done."""
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started


@dataclass(frozen=True)
class Ceilings:
    """What the device did when nothing else was asked of it."""

    copied: float  # bytes a second, read and written both counted
    multiplied: float  # floating point operations a second, bfloat16

    @classmethod
    def measure(cls, device: torch.device, copy_bytes: int = COPY_BYTES, product: int = PRODUCT) -> Ceilings:
        source = torch.ones(copy_bytes // 4, device=device)
        target = torch.empty_like(source)
        copied = 2 * copy_bytes / device_seconds(lambda: target.copy_(source), device, runs=10)
        x, y = (torch.randn(product, product, device=device).bfloat16() for _ in range(2))
        multiplied = 2 * product**3 / device_seconds(lambda: x @ y, device, runs=5)
        return cls(copied, multiplied)
