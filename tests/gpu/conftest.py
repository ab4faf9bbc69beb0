"""Tests of everything around the kernels on a real GPU; without one, those that Triton's interpreter can run are slow tests.

That is how they are known to be right before a GPU is at hand. Graphs need one.
"""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from gpu_faults import leave_if_spoiled

from foretoken.engine import drafters, gpu_memory, model, network_plan
from foretoken.engine.config import ModelConfig

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    import triton_interpreter  # noqa: F401  before any kernel is imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.slow)


def pytest_runtest_setup() -> None:
    leave_if_spoiled()


@pytest.fixture
def device() -> str:
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture
def gpu() -> str:
    """For what only a GPU has: graphs, its memory."""
    if not HAS_GPU:
        pytest.skip("there is no GPU")
    return "cuda"


@pytest.fixture(autouse=True)
def as_quiet_as_a_gpu() -> Iterator[None]:
    """The interpreter computes masked lanes too, and numpy would warn of infinities there."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture
def a_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For what an engine does on one: without it, the plan believes in a GPU that is the CPU by another name."""
    if device == "cuda":
        return

    def measure(device: torch.device, utilization: float, run_largest_step: Callable[[], None], graphs: int) -> gpu_memory.GpuMemory:
        run_largest_step()
        return gpu_memory.GpuMemory("no GPU", 2**34, utilization, 2**35, 0, 0, graphs)

    monkeypatch.setattr(network_plan, "resolve_device", lambda config, has_program: "cpu:0")
    monkeypatch.setattr(network_plan, "gpu_name", lambda device: "no GPU")
    monkeypatch.setattr(network_plan, "multiplies_fp8", lambda device: True)
    monkeypatch.setattr(drafters, "multiplies_fp8", lambda device: False)
    monkeypatch.setattr(drafters, "ModelConfig", lambda name, device, **rest: ModelConfig(name, **rest))  # "cpu:0" is no setting
    monkeypatch.setattr(model, "free_bytes", lambda device: 2**34)
    monkeypatch.setattr(gpu_memory, "measure", measure)
