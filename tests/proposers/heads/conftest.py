"""What some kinds of heads learn from, taught once."""

import pytest
from taught_target import TaughtTarget


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> TaughtTarget:
    return TaughtTarget(tmp_path_factory.mktemp("target"))
