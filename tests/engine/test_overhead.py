"""The overhead bench measures what it says: real steps with real drafts, and no forward pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretoken.engine.overhead import CASES, main, measure


@pytest.mark.parametrize("case", CASES[:4], ids=lambda case: case[0])
def test_drafts_are_right_and_all_tokens_counted(case: tuple) -> None:
    name, rows, k, params = case
    result = measure(name, rows, k, params, steps=20)
    assert result.tokens_per_step == k + 1, "the instant network counts in a circle: every guess of a full draft is right"
    # The promise is 0.3 ms; a busy machine may be much slower, but not by this much.
    assert 0 < result.median_ms < 15


def test_the_command_prints_every_case(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["--steps", "3", "--json", str(tmp_path / "out.json")])
    printed = capsys.readouterr().out
    assert len(json.loads((tmp_path / "out.json").read_text())) == len(CASES) == len(printed.splitlines()) - 1
