import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foretoken.server.option_forms import count, new_file, new_picture, temperature


@pytest.mark.parametrize(
    ("form", "text", "value"),
    [(count, "2k", 2000), (count, "2K", 2048), (count, "1.5k", 1500), (temperature, "0.7", 0.7), (temperature, "0", 0.0)],
)
def test_forms_read(form: Callable[[str], Any], text: str, value: float) -> None:
    assert form(text) == value


@pytest.mark.parametrize(
    ("form", "text", "says"),
    [
        (count, "0", "not a positive integer"), (count, "1.5", "not a positive integer"), (count, "-1", "not a positive integer"),
        *[(temperature, text, "is not a temperature") for text in ("hot", "-1", "nan", "inf", "101")],
    ],
)
def test_forms_refuse(form: Callable[[str], Any], text: str, says: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=says):
        form(text)


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old").touch()
    monkeypatch.chdir(tmp_path)
    assert [new_file(name) for name in ("new", str(tmp_path / "old"))] == [Path("new"), tmp_path / "old"]
    for name, says in {".": "is a folder", str(tmp_path): "is a folder", "none/new": "no folder 'none'", "old/new": "no folder"}.items():
        with pytest.raises(argparse.ArgumentTypeError, match=says):
            new_file(name)


def test_a_picture_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.server.option_forms.find_spec", lambda name: None)
    with pytest.raises(argparse.ArgumentTypeError, match="needs matplotlib"):
        new_picture(str(tmp_path / "a.png"))
