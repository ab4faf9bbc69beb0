"""The whole command on a tiny model, and what counts as slower."""

import dataclasses
import json
from pathlib import Path

import pytest

from foretoken.engine.bench.workloads import Comparison, median_interval
from foretoken.server.bench.workloads import holds, main, report

GOOD = Comparison("chat at 1", 8, 20, 1.01, 0.98, 1.05, 100.0, 2.0, 0.4, True)


def test_every_kind_that_has_prompts_is_compared(tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    code = "```\none two one two\n```"
    rows = [{"category": "edits", "messages": [{"role": "user", "content": f"Copy.\n{code}"}], "prediction": code}]
    rows += [{"category": "chat", "messages": [{"role": "user", "content": text}]} for text in ("red, green", "a fox")]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--dataset", str(prompts), "--batch", "1,2", "--pairs", "1", "--threads", "1", "--speculative-config", '{"method": "ngram"}']
    written = [str(tmp_path / name) for name in ("out.json", "out.md", "out.png")]
    wanted = "edits,edits predicted,json,chat,20 tokens,random tokens,edits known"
    flags += ["--only", wanted, "--json", written[0], "--markdown", written[1], "--plot", written[2]]
    assert main([str(tiny_target), *flags]) in (0, 1)
    found = json.loads(Path(written[0]).read_text())["comparisons"]
    kinds = ("edits", "edits predicted", "chat", "20 tokens", "random tokens", "edits known")
    cases = [(one["workload"], one["batch"]) for one in found]
    assert cases == [(kind, batch) for kind in kinds for batch in (1, 2)], "there is no JSON prompt"
    assert all(one["same"] and one["median"] > 0 and one["low"] <= one["median"] <= one["high"] for one in found)
    assert Path(written[1]).read_text() == capsys.readouterr().out.removesuffix("\n")
    assert Path(written[2]).read_bytes()[:4] == b"\x89PNG"


def test_the_range_of_a_few_pairs_is_called_no_interval() -> None:
    assert "| 95 % interval |" in report([GOOD], "") and "and its 95 % interval." in report([GOOD], "")
    assert "95 %" not in report([dataclasses.replace(GOOD, pairs=5)], "")


def test_an_unknown_kind_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "poems"])
    assert "there is no poems; there are edits" in capsys.readouterr().err


@pytest.mark.parametrize(("changed", "expected"), [
    ({}, True), ({"median": 0.96}, False), ({"low": 0.93}, False), ({"workload": "edits"}, True),
    ({"workload": "edits", "batch": 1}, False), ({"workload": "edits", "batch": 1, "median": 2.6, "low": 2.0}, True),
])
def test_what_holds(changed: dict[str, object], expected: bool) -> None:
    assert holds(dataclasses.replace(GOOD, **changed)) is expected  # pyright: ignore[reportArgumentType]


def test_the_interval_of_a_median() -> None:
    assert [median_interval(count) for count in (1, 5, 6, 9, 20)] == [(0, 0), (0, 4), (0, 5), (1, 7), (5, 14)]
