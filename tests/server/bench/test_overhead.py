"""`foretoken bench overhead` as a user runs it."""

import json
from pathlib import Path

import pytest

from foretoken.engine.bench.overhead import ADAPTIVE_ROWS, CASES
from foretoken.server.bench.overhead import main


def test_the_command_prints_every_case(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["--steps", "3", "--json", str(tmp_path / "out.json")])
    printed = capsys.readouterr().out
    assert len(json.loads((tmp_path / "out.json").read_text())) == len(CASES) + len(ADAPTIVE_ROWS) == len(printed.splitlines()) - 1
