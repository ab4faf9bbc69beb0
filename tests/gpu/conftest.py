"""Tests of everything around the kernels on a real GPU; without one they are left out, but for those that Triton's interpreter can run.

TRITON_INTERPRET=1 runs them on the CPU too, graphs excepted: that is how they are known to be right before a GPU is at hand.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

HAS_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED and not HAS_GPU:
    import triton_interpreter  # noqa: F401  before any kernel is imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU or INTERPRETED:
        return
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason="there is no GPU"))


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
