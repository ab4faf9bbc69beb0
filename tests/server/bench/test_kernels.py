import json
from pathlib import Path

import pytest

from foretoken.engine.bench.measurement import GENERATE, MACHINE, NETWORK, SERVER, STREAMED
from foretoken.kernels.native_library import Availability
from foretoken.server.bench.kernels import JSON_NAME, PLOT_NAME, Run, main
from foretoken.server.cli import run
from foretoken.server.exit_status import CONFIG, INTERRUPTED


def test_one_command_measures_all_levels_and_writes_all_files(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "docs" / "cpu.md"
    flags = ["--quick", "--rounds", "1", "--threads", "1", "--model", str(tiny_target), "--precisions", "float32"]
    main([*flags, "--parts", "network,generate,http", "--output-dir", str(tmp_path / "out"), "--markdown", str(page)])
    results = json.loads((tmp_path / "out" / JSON_NAME).read_text())
    assert set(results) == {"schema", "command", "machine", "effort", "skipped", "measurements"}
    assert results["schema"] == 1 and not results["skipped"] and "--threads 1" in results["command"]
    found = {(m["level"], m["case"], m["x"]): m for m in results["measurements"]}
    for case in [
        (MACHINE, "read", 1), (NETWORK, "decode", 128), (NETWORK, "verification", 16), (NETWORK, "context", 128), (GENERATE, "decode", 128),
        (GENERATE, "rows", 4), (SERVER, "decode", 128), (STREAMED, "decode", 128), (SERVER, "load", 4), (STREAMED, "load", 4),
    ]:
        measurement = found[case]
        assert set(measurement) == {"model", "precision", "level", "case", "x", "unit", "value", "ratio", "ratio_to"}
        assert measurement["model"] == tiny_target.name and measurement["value"]["median"] > 0
    assert found[STREAMED, "load", 4]["ratio_to"] == GENERATE
    assert 0 < found[STREAMED, "chunks", 4]["value"]["median"] <= 1
    assert 0 < found[STREAMED, "server CPU", 4]["value"]["median"] < 100_000
    printed = capsys.readouterr().out
    assert page.read_text().strip() == printed.strip()
    assert f"| {tiny_target.name}, float32, context 128 " in printed and "## The server under load" in printed
    if (tmp_path / "out" / PLOT_NAME).exists() or pytest.importorskip("matplotlib"):
        assert (tmp_path / "out" / PLOT_NAME).read_bytes()[:4] == b"\x89PNG"


def test_what_cannot_run_here_is_left_out_with_the_reason(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("foretoken.kernels.native.availability", lambda: Availability(None, "this test has no AVX2"))
    flags = [
        "--quick", "--rounds", "1", "--threads", "1", "--model", str(tiny_target), "--precisions", "int8,float32", "--parts", "network",
    ]
    main([*flags, "--output-dir", str(tmp_path)])
    results = json.loads((tmp_path / JSON_NAME).read_text())
    (skipped,) = results["skipped"]
    assert skipped.startswith(f"{tiny_target.name}, int8: ") and "this test has no AVX2" in skipped
    assert {m["precision"] for m in results["measurements"] if m["model"]} == {"float32"}
    assert f"not measured: {skipped}" in capsys.readouterr().out


def test_a_model_that_is_not_there_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--model", "./nowhere", "--output-dir", str(tmp_path)]) == CONFIG
    assert "foretoken: error: there is no folder ./nowhere" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_is_told_before_anything_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["--quick", "--models", "demo", "--output-dir", str(tmp_path / "file" / "out")]) == CONFIG
    assert "foretoken: error: [Errno 20] Not a directory" in capsys.readouterr().err


def test_one_that_is_stopped_says_so_by_its_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "measure_once", stopped)
    assert main(["--quick", "--models", "", "--output-dir", str(tmp_path)]) == INTERRUPTED


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--models", "M7"], "'M7' is not one of M1, M2, M3, M4, M5, demo"),
        (["--precisions", "fp8"], "not one of float32"),
        (["--threads", "0"], "positive integer"),
    ],
)
def test_mistakes_in_the_command_line(flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(flags)
    assert caught.value.code == 2 and complaint in capsys.readouterr().err


@pytest.mark.parametrize("command", ["bench kernels", "bench compare", "bench speculation", "tune"])
def test_the_commands_are_there(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run([*command.split(), "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and f"usage: foretoken {command}" in said and "examples:" in said
