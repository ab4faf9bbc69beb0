"""The whole command on a tiny model."""

import json
from pathlib import Path

import pytest

from foretoken.proposers.config_reading import parse_speculative_config
from foretoken.server.bench.speculation import main

FLAGS = ["--dtype", "float32", "--threads", "1", "--kv-cache-gb", "0.01", "--max-tokens", "10", "--ignore-eos"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    texts = ("one two one two", "red, green, blue", "a fox")
    file.write_text("".join(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in texts))
    return file


def test_one_command_measures_everything_and_says_what_to_set(
    tiny_target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    config = json.dumps([{"method": "ngram", "prompt_lookup_max": 3}, {"method": "draft_model", "model": str(tiny_target)}])
    flags = [str(tiny_target), *FLAGS, "--dataset", str(prompts), "--speculative-config", config, "--methods", "ngram,draft_model"]
    flags += ["--k", "1,3", "--concurrency", "1,2", "--rounds", "1", "--per-request", "--json", str(out), "--plot", str(picture)]
    assert main(flags) == 0
    report = json.loads(out.read_text())
    wanted = [(n, m, k, a) for n in (1, 2) for m in ("ngram", "draft_model") for k, a in ((1, False), (3, False), (3, True))]
    cases = [(f["concurrency"], f["setting"]["method"], f["setting"]["k"], f["setting"]["adaptive"]) for f in report["figures"]]
    assert cases == wanted
    for figures in report["figures"]:
        assert figures["same_answers"] == 1.0, figures["setting"]
        assert figures["baseline"]["median"] > 0 and figures["speedup"]["median"] > 0 and len(figures["requests"]) == 3
        if figures["setting"] == {"method": "draft_model", "k": 3, "adaptive": False}:
            assert figures["acceptance_rate"] > 0.7, "it guesses for itself, maybe in int8"
            assert figures["mean_accepted_length"] > 2
    assert report["schema"] == 2 and report["machine"]["cores"] >= 1 and "--k 1,3" in report["command"]
    parse_speculative_config(report["speculative_config"])
    printed = capsys.readouterr().out
    for words in ("Baseline:", "Speculative:", "Speedup:", "Acceptance rate:", report["advice"], "Requests of the last round"):
        assert words in printed
    assert printed.rstrip().endswith(report["paste"])
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_steps_are_shown_one_a_line(tiny_target: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.dumps({"method": "draft_model", "model": str(tiny_target), "quantization": "none"})
    flags = [str(tiny_target), *FLAGS, "--dataset", str(prompts), "--speculative-config", config, "--k", "4", "--show-steps"]
    assert main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "draft_model, k=4:" and "10 tokens in" in lines[-1]
    assert any(line.startswith("  Draft: ") and " ms, verify: " in line and line.endswith("ms, accepted 4/4") for line in lines)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--methods", "eagle9"], "there is no eagle9"),
        (["--dataset", "/nowhere/at/all.txt"], "/nowhere/at/all.txt"),
        (["--max-tokens", "4096"], "lower --max-tokens"),
    ],
)
def test_mistakes_are_told_in_one_line(tiny_target: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tiny_target), *FLAGS, "--k", "1,3", *flags]) == 78
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("foretoken: error:")]
    assert len(lines) == 1 and words in lines[0]
