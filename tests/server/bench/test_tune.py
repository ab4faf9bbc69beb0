import json
from pathlib import Path

import pytest
import yaml
from speculation_figures import figures

from foretoken.engine.bench.speculation import Method
from foretoken.engine.bench.speculation_figures import Setting
from foretoken.proposers.config import NgramConfig
from foretoken.server.bench.tune import FINALISTS, MARK, Heat, heats, main, settings_file
from foretoken.server.config import ServerConfig

METHODS = {"ngram": Method("ngram", ({"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4},))}
ADAPTIVE, FIXED = Setting("ngram", 7, adaptive=True), Setting("ngram", 3)


def test_heats_grow_while_settings_fall_out() -> None:
    assert heats(40, 32, 9) == [Heat(2, 1), Heat(4, 1), Heat(8, 1), Heat(16, 1), Heat(32, 9)]
    assert heats(FINALISTS, 32, 9) == [Heat(32, 9)]
    assert heats(20, 2, 9) == [Heat(2, 1), Heat(2, 2), Heat(2, 4), Heat(2, 9)], "few prompts: more rounds instead"
    assert heats(20, 1, 1)[-1] == Heat(1, 1)


def written(tmp_path: Path, text: str) -> ServerConfig:
    file = tmp_path / "tuned.yaml"
    file.write_text(text)
    return ServerConfig.from_cli(["--config", str(file)])


def test_the_server_reads_what_is_written(tiny_target: Path, tmp_path: Path) -> None:
    page = settings_file(str(tiny_target), [figures(ADAPTIVE, 1.5)], METHODS, {"kv_cache_gb": 0.5, "threads": 1}, ["one\nline"[:3]])
    config = written(tmp_path, page).engine
    assert page.startswith(MARK) and "# one\n" in page
    assert config.model.model == str(tiny_target) and config.model.threads == 1 and config.cache.kv_cache_gb == 0.5
    assert config.speculative and config.speculative.adaptive
    assert config.speculative.proposers == (NgramConfig(7, prompt_lookup_min=2, prompt_lookup_max=4),)
    fixed = written(tmp_path, settings_file("foretoken-demo", [figures(FIXED, 1.5, 1), figures(FIXED, 0.5, 8)], METHODS, {}, [])).engine
    assert fixed.model.model == "foretoken-demo"
    assert fixed.speculative and not fixed.speculative.adaptive and fixed.speculative.disable_by_batch_size == 1


def test_off_is_written_where_nothing_pays(tmp_path: Path) -> None:
    config = written(tmp_path, settings_file("foretoken-demo", [figures(ADAPTIVE, 1.01)], METHODS, {}, [])).engine
    assert config.speculative and config.speculative.off


def test_a_whole_run(tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "tuned.yaml"
    prompts.write_text("one two one two\nred, green, blue\na fox\n")
    flags = [str(tiny_target), "--dtype", "float32", "--threads", "1", "--kv-cache-gb", "0.01", "--max-tokens", "8", "--ignore-eos"]
    flags += ["--dataset", str(prompts), "--methods", "ngram,suffix", "--k", "1,3", "--concurrency", "1,2", "--rounds", "2"]
    assert main([*flags, "--out", str(out)]) == 0
    (printed, told), page = capsys.readouterr(), out.read_text()
    assert "answer/s" not in told, "no bar where there is no terminal"
    table = [line for line in printed.splitlines() if line.startswith(("ngram", "suffix"))]
    assert len(table) == 2 * FINALISTS, "six settings were tried, three were left at the end"
    assert "Speculation does not pay" in printed or "Chosen: " in printed
    header = [line for line in page.splitlines() if line.startswith("#")]
    assert f"--dataset {prompts}" in page and "3 prompts" in page and all(f"# {line}" in header for line in table)
    config = ServerConfig.from_cli(["--config", str(out)]).engine
    assert config.model.model == str(tiny_target) and config.speculative is not None
    settings = yaml.safe_load(page)
    assert settings["kv-cache-gb"] == 0.01
    assert ("off" in json.dumps(settings["speculative-config"])) == ("does not pay" in printed)


def test_somebody_elses_file_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "server.yaml"
    mine.write_text("port: 9000\n")
    assert main(["--out", str(mine)]) == 78 and mine.read_text() == "port: 9000\n"
    assert "did not write it" in capsys.readouterr().err
    assert main(["--out", str(tmp_path / "no" / "x.yaml")]) == 78
    assert "there is no folder" in capsys.readouterr().err
