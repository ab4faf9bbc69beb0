"""What steps in rounds are compared with."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from in_rounds import OPTIONS

from foretoken import LLM


@pytest.fixture(scope="module")
def plain(tiny_target: Path) -> Iterator[LLM]:
    with LLM(tiny_target, {"method": "off"}, **OPTIONS) as llm:
        yield llm
