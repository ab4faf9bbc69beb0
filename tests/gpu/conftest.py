"""Tests of everything around the kernels on a real GPU; without one, those that Triton's interpreter can run are slow tests.

That is how they are known to be right before a GPU is at hand. Graphs need one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    import triton_interpreter  # noqa: F401  before any kernel is imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.slow)


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
