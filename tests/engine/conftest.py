"""What steps in rounds are compared with, and how they come to guesses."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from in_rounds import OPTIONS

from foretoken import LLM
from foretoken.engine.policy.rounds_choice import RoundsChoice


@pytest.fixture(scope="module")
def plain(tiny_target: Path) -> Iterator[LLM]:
    with LLM(tiny_target, {"method": "off"}, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def guesses_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a tiny network's random text is worth guessing for is no question here."""
    monkeypatch.setattr(RoundsChoice, "_depth", lambda choice, proposer, request, most, *others: most)
