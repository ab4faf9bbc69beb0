import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from running_server import RunningServer

from foretoken.server.bench.compare import main, summaries, table, take_turns
from foretoken.server.bench.contestants import Turn


class Recorded:
    """Answers at once, and writes down when it was asked."""

    def __init__(self, name: str, log: list[str], seconds: Sequence[float]) -> None:
        self.name, self._log, self._seconds = name, log, iter(seconds)

    def run(self, prompts: Sequence[str]) -> Turn:
        self._log.append(f"{self.name}:{'+'.join(prompts)}")
        return Turn(10, next(self._seconds), None, None, tuple(prompts))


def test_groups_alternate_and_ratios_are_taken_group_by_group() -> None:
    log: list[str] = []
    first, second = Recorded("A", log, [9.0, 1.0, 2.0, 8.0]), Recorded("B", log, [9.0, 0.5, 1.0, 4.0])  # both slow down, B is twice as fast
    turns = take_turns([first, second], [["x"], ["y", "z"], ["w"]])
    assert log == ["A:x", "B:x", "B:x", "A:x", "A:y+z", "B:y+z", "B:w", "A:w"]
    one, two = summaries(turns)
    assert (one.ratio, one.ratio_low, one.ratio_high) == (1.0, 1.0, 1.0)
    assert (two.ratio, two.ratio_low, two.ratio_high, two.tokens) == (2.0, 2.0, 2.0, 30)
    assert "2.00x   2.00 - 2.00" in table([one, two])


def test_texts_and_times_are_compared() -> None:
    a = [Turn(4, 1.0, 0.2, 0.01, ("x", "y")), Turn(4, 1.0, 0.4, 0.03, ("x", "y"))]
    b = [Turn(4, 2.0, None, None, ("x", "n")), Turn(4, 4.0, None, None, ("x", "y"))]
    one, two = summaries({"a": a, "b": b})
    assert one.first_ms == pytest.approx(300) and one.gap_ms == pytest.approx(20) and two.first_ms is None
    assert two.same_texts == 0.75 and two.ratio == pytest.approx(0.375) and two.ratio_low < two.ratio < two.ratio_high


@pytest.mark.parametrize("peers", [[], pytest.param(["transformers"], marks=pytest.mark.slow)], ids=["itself", "transformers too"])
def test_a_real_server_against_itself_and_others(
    peers: list[str], tiny_target: Path, tmp_path: Path, server_process: Callable[..., RunningServer], capsys: pytest.CaptureFixture[str]
) -> None:
    server = server_process(tiny_target, "--dtype", "float32", "--speculative-config", '{"method": "off"}')
    out = tmp_path / "out.json"
    flags = ["--num-prompts", "3", "--max-tokens", "16", "--concurrency", "2", "--stream", "--ignore-eos", "--json", str(out)]
    again = server.url.replace("127.0.0.1", "localhost") + "/v1"
    for peer in peers:
        flags += ["--peer", peer, "--model", str(tiny_target), "--dtype", "float32", "--threads", "1"]
    assert main(["--base-url", server.url, "--base-url", again, *flags]) == 0
    result = json.loads(out.read_text())
    assert result["schema"] == 1 and "--concurrency 2" in result["command"]
    assert [s["name"] for s in result["summaries"]] == [server.url, again, *peers]
    for summary in result["summaries"]:
        assert summary["tokens"] == 48 and summary["same_texts"] == 1.0, "greedy answers of one model"
        assert summary["first_ms"] > 0 and (summary["gap_ms"] is None or summary["gap_ms"] > 0)
        assert summary["ratio_low"] <= summary["ratio"] <= summary["ratio_high"]
        assert [len(turn["texts"]) for turn in result["groups"][summary["name"]]] == [2, 1]
    said = capsys.readouterr()
    assert said.out.count("100%") == 2 + len(peers) and "group/s" not in said.err, "no bar where there is no terminal"


def test_a_server_that_is_down(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--base-url", "http://127.0.0.1:9", "--base-url", "http://127.0.0.1:9"]) == 69
    assert "no server answers at http://127.0.0.1:9 " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--base-url", "http://a"], "two are needed to compare"),
        (["--peer", "transformers"], "two are needed to compare"),
        (["--base-url", "http://a", "--peer", "transformers"], "needs --model"),
        (["--base-url", "http://a", "--base-url", "http://b", "--num-prompts", "0"], "'0' is not a positive integer"),
        (["--base-url", "http://a", "--base-url", "http://b", "--prompts", "no-such-file"], "--prompts no-such-file cannot be read"),
        (["--base-url", "http://a", "--base-url", "http://b", "--json", "no-such-folder/a"], "there is no folder 'no-such-folder'"),
        (["--base-url", "http://a", "--base-url", "http://b", "--json", "."], "is a folder: name a file"),
        (["--base-url", "http://a", "--base-url", "http://b", "--api-key", "ké"], "must be printable ASCII"),
        (
            ["--base-url", "http://a", "--base-url", "http://b", "--base-url", "http://c", "--api-key", "x", "--api-key", "y"],
            "--api-key once",
        ),
    ],
)
def test_mistakes_in_the_command_line(flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(flags)
    assert caught.value.code == 2 and complaint in capsys.readouterr().err
