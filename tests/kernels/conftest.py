"""What tests of kernels share."""

from collections.abc import Iterator

import pytest

from foretoken.kernels import native


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Passes of native executors are the work of two."""
    native.set_threads(2)
    yield
    native.set_threads(1)


@pytest.fixture
def three_threads() -> Iterator[None]:
    native.set_threads(3)
    yield
    native.set_threads(1)
