"""`foretoken bench training`: both really train, and the ratio is theirs."""

import re

import pytest

from foretoken.server.cli import run


def test_both_train_and_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "training", "--hidden", "64", "--layers", "1", "--rounds", "1", "--steps", "1"]) == 0
    said = capsys.readouterr().out
    ours, plain = (float(re.search(rf"\| {name} \| ([\d,]+) \|", said)[1].replace(",", ""))  # pyright: ignore[reportOptionalSubscript]
                   for name in ("foretoken train", re.escape("transformers + AdamW")))
    ratio = float(re.search(r"\(quartiles\) \| ([\d.]+) ", said)[1])  # pyright: ignore[reportOptionalSubscript]
    assert ours > 100 and plain > 100 and ratio == pytest.approx(ours / plain, abs=0.02)
    assert "foretoken bench training --hidden 64" in said, "the command beside the figures"


def test_a_width_that_heads_do_not_fill_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["bench", "training", "--hidden", "100"])
    assert "a multiple of 64" in capsys.readouterr().err
