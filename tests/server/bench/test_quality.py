"""`foretoken bench quality` as a user runs it."""

import json
import sys
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


def test_the_command_says_what_cannot_be_had(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    ("flags", "status"),
    [(["--formats", "int2"], 2), (["--context", "0"], 2), (["--model", "/no/such/folder"], 78), (["--text", "/no/text"], 78)],
)
def test_mistakes_are_one_line(flags: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(flags))
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("foretoken: error: ")]
    assert ended.value.code == status and len(told) == 1
