"""The same tests on a GPU where there is one, else in Triton's interpreter."""

from collections.abc import Iterator

import numpy as np
import pytest
from gpu_faults import leave_if_spoiled


def pytest_runtest_setup() -> None:
    leave_if_spoiled()


@pytest.fixture(autouse=True)
def as_quiet_as_a_gpu() -> Iterator[None]:
    """The interpreter computes masked lanes too, and numpy would warn of infinities there."""
    with np.errstate(all="ignore"):
        yield
