"""`foretoken bench quality` as a user runs it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from foretoken.kernels import native
from foretoken.server.bench.quality import main


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = native.threads()
    yield
    native.set_threads(before)


def test_the_command_says_what_cannot_be_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "supports", lambda program, execution: "no such processor")
    text, out = tmp_path / "text.md", tmp_path / "out.json"
    text.write_text("user: Hello\nassistant: Hi!\n---\nuser: What is a list?\nassistant: Things in order.")
    main(["--formats", "int8,float32", "--text", str(text), "--answer-tokens", "4", "--json", str(out)])
    report = json.loads(out.read_text())
    assert [found["name"] for found in report["formats"]] == ["bfloat16", "float32"]
    assert [line.split(":")[0] for line in report["skipped"]] == ["int8 draft", "int4 draft", "int8"]
    assert all("no such processor" in line for line in report["skipped"])
    assert report["formats"][0]["change"] == 0.0 and report["formats"][0]["agreement"] == 1.0
    assert report["formats"][1]["perplexity"] == pytest.approx(report["formats"][0]["perplexity"], rel=0.05)
    assert 1 <= report["formats"][0]["accepted_length"]["bfloat16"]["3"] <= 4
    printed = capsys.readouterr().out
    assert "| float32 " in printed and "Not measured: int8: " in printed


@pytest.mark.parametrize("flags", [["--formats", "int2"], ["--context", "0"], ["--model", "/no/such/folder"], ["--text", "/no/text"]])
def test_mistakes_are_one_line(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(flags)
    assert stopped.value.code == 2 or str(stopped.value.code).startswith("foretoken: error: ")
