"""The whole command on a tiny model: what it answers, what it refuses, and that a killed run goes on."""

import fcntl
import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from running_server import environment

from foretoken.server.exit_status import DATA, INTERRUPTED
from foretoken.server.run_batch import run_batch

FLAGS = ("--dtype", "float32", "--threads", "1", "--kv-cache-gb", "0.02", "--max-num-seqs", "4")
USER = {"role": "user", "content": "hello"}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """The command sets up logging for a process of its own."""
    loggers = [logging.getLogger(name) for name in ("", "foretoken", "uvicorn.access", "uvicorn.error")]
    before = [(logger, logger.level, logger.handlers[:]) for logger in loggers]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def request(custom_id: str, url: str = "chat/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": f"/v1/{url}", "body": body}


def question(custom_id: str, **body: Any) -> dict[str, Any]:
    return request(custom_id, messages=[USER], **{"temperature": 0, "max_tokens": 6, "ignore_eos": True} | body)


def write(path: Path, lines: Sequence[dict[str, Any] | str]) -> None:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


def read(path: Path) -> list[dict[str, Any]]:
    raw = path.read_bytes()
    assert raw.endswith(b"\n") or not raw
    return [json.loads(line) for line in raw.splitlines()]


def command(model: Path, files: tuple[Path, Path], *more: str) -> list[str]:
    return ["--input", str(files[0]), "--output", str(files[1]), str(model), *FLAGS, *more]


def begun(num_answers: int, model: Path, files: tuple[Path, Path], *more: str) -> subprocess.Popen[str]:
    """A process of the command that has written so many answers."""
    argv = [sys.executable, "-m", "foretoken", "run-batch", *command(model, files, *more)]
    running = subprocess.Popen(argv, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not files[1].exists() or files[1].read_bytes().count(b"\n") < num_answers:
        assert running.poll() is None and time.monotonic() < deadline, running.communicate()
        time.sleep(0.002)
    return running


def test_every_kind_of_request_is_answered_and_mistakes_stop_nothing(
    tiny_target: Path, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write(
        files[0],
        [
            *[question(f"q{i}") for i in range(10)],
            request("text", "completions", prompt="The quick", max_tokens=5, ignore_eos=True),
            request("vector", "embeddings", input="The quick brown fox"),
            request("response", "responses", input="hello", max_output_tokens=5),
            "",  # line 14 is no line of ours
            question("much", temperature=-1),
            question("q3"),
            question("stream", stream=True),
            request("where", "chat"),
            "{nonsense",
            {"method": "POST", "url": "/v1/completions", "body": {}},
            question("\ud800"),
        ],
    )
    assert run_batch(command(tiny_target, files)) == DATA
    answers: dict[str, Any] = {entry["custom_id"]: entry for entry in read(files[1]) if entry["error"] is None}
    refused: dict[int, Any] = {entry["error"]["line"]: entry["error"] for entry in read(files[1]) if entry["error"]}

    assert all(set(entry) == {"id", "custom_id", "response", "error"} for entry in read(files[1]))
    assert len({entry["id"] for entry in read(files[1])}) == 20
    texts = {answers[f"q{i}"]["response"]["body"]["choices"][0]["message"]["content"] for i in range(10)}
    assert len(texts) == 1, "greedy answers to one question"
    for name in ("q0", "text", "vector", "response"):
        assert answers[name]["response"]["status_code"] == 200 and answers[name]["response"]["request_id"]
    assert answers["text"]["response"]["body"]["usage"]["completion_tokens"] == 5
    assert len(answers["vector"]["response"]["body"]["data"][0]["embedding"]) == 64
    assert answers["response"]["response"]["body"]["object"] == "response"
    assert answers["\ud800"]["response"]["status_code"] == 200
    bad = answers["much"]["response"]
    assert bad["status_code"] == 400 and bad["body"]["error"]["param"] == "temperature"

    assert refused.keys() == {16, 17, 18, 19, 20}
    for number, words in {16: "that of line 4", 17: "stream", 18: "url must be one of", 19: "not JSON", 20: "custom_id"}.items():
        assert words in refused[number]["message"]
    told = capsys.readouterr()
    assert "14 answered, 6 failed, 0 left of 20 lines" in told.out and "tokens/s" in told.out
    assert "line 15 (much): status 400: " in told.err and "line 19: not JSON" in told.err
    assert "\x1b" not in told.out + told.err


def test_a_killed_run_goes_on_where_it_stopped(tiny_target: Path, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    lines = [question(f"q{i}", max_tokens=100 + i % 7) for i in range(120)]
    write(files[0], [*lines, "nonsense"])
    running = begun(8, tiny_target, files, "--concurrency", "3")
    running.kill()
    running.communicate()
    whole = files[1].read_bytes()
    before = read(files[1])
    assert 8 <= len(before) < 121
    files[1].write_bytes(whole + b'{"id": "batch_req_1", "custom_id": "q119", "resp')  # what a power cut leaves

    assert run_batch(command(tiny_target, files)) == DATA
    after = read(files[1])
    assert after[: len(before)] == before, "what was there stays"
    assert sorted(entry["custom_id"] or "" for entry in after) == sorted(["", *(line["custom_id"] for line in lines)])
    tokens = {entry["custom_id"]: entry["response"]["body"]["usage"]["completion_tokens"] for entry in after if entry["response"]}
    assert tokens == {line["custom_id"]: line["body"]["max_tokens"] for line in lines}
    assert f"{len(before)} of them were there before" in capsys.readouterr().out

    assert run_batch(command(tiny_target, files)) == DATA, "nothing is left: no model is loaded"
    told = capsys.readouterr()
    assert "120 answered, 1 failed, 0 left" in told.out and "loading" not in told.err and read(files[1]) == after


def test_a_corrected_line_is_asked(tiny_target: Path, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    write(files[0], [question("q0"), "nonsense"])
    assert run_batch(command(tiny_target, files)) == DATA
    write(files[0], [question("q0"), question("q1"), question("q2")])
    for _ in range(2):
        assert run_batch(command(tiny_target, files)) == 0
        assert "3 answered, 0 failed, 0 left of 3 lines" in capsys.readouterr().out
    assert sorted(entry["custom_id"] or "" for entry in read(files[1])) == ["", "q0", "q1", "q2"]


def test_a_signal_ends_it_and_loses_nothing(tiny_target: Path, files: tuple[Path, Path]) -> None:
    write(files[0], [question(f"q{i}", max_tokens=300) for i in range(200)])
    running = begun(2, tiny_target, files)
    running.terminate()
    out, err = running.communicate(timeout=30)
    assert running.returncode == INTERRUPTED and "Traceback" not in err and "the same command goes on" in err
    answers = read(files[1])
    assert f"{len(answers)} answered, 0 failed, {200 - len(answers)} left" in out
    assert all(entry["response"]["status_code"] == 200 for entry in answers)


def test_requests_wait_for_a_full_queue(tiny_target: Path, files: tuple[Path, Path]) -> None:
    """Each has two choices, of which the queue holds two at a time."""
    write(files[0], [question(f"q{i}", n=2, max_tokens=200) for i in range(3)])
    assert run_batch(command(tiny_target, files, "--max-num-seqs", "1", "--max-queued-requests", "2")) == 0
    assert [len(entry["response"]["body"]["choices"]) for entry in read(files[1])] == [2, 2, 2]


@pytest.mark.parametrize(
    ("input", "output", "words"),
    [
        (None, "", "cannot be read: No such file"),
        ([question("a")], '{"custom_id": "b", "response": {"status_code": 200}, "error": null}\n', "custom_id 'b' is not in this one"),
        (["nonsense"], '{"custom_id": "b", "response": {"status_code": 200}, "error": null}\n', "custom_id 'b' is not in this one"),
        (["nonsense"], '{"response": null, "error": {"code": "invalid_line", "line": 2}}\n', "a faulty line 2 is not in this one"),
        ([question("a")], '{"something": "else"}\n', "line 1 is no answer of a batch"),
    ],
)
def test_files_that_do_not_fit_are_refused_and_left_alone(
    tiny_target: Path, files: tuple[Path, Path], input: list[Any] | None, output: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if input is not None:
        write(files[0], input)
        files[1].write_text(output)
    assert run_batch(command(tiny_target, files)) == DATA
    assert words in capsys.readouterr().err
    if input is not None:
        assert files[1].read_text() == output


def test_only_ordinary_files_will_do(tiny_target: Path, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """What is read again must be there again: a pipe is not, and a device may have no end."""
    write(files[0], [question("a")])
    assert run_batch(["--input", str(files[0]), "--output", "/dev/null", str(tiny_target)]) == DATA
    assert "--output /dev/null is no ordinary file" in capsys.readouterr().err
    assert run_batch(["--input", "/dev/null", "--output", str(files[1]), str(tiny_target)]) == DATA
    assert "--input /dev/null is no ordinary file" in capsys.readouterr().err and not files[1].exists()


def test_two_runs_cannot_write_one_file(tiny_target: Path, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    write(files[0], [question("a")])
    with files[1].open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert run_batch(command(tiny_target, files)) == DATA
    assert "is being written by another run" in capsys.readouterr().err
    assert run_batch(["--input", str(files[0]), "--output", str(files[0]), str(tiny_target)]) == DATA
    assert "the same file" in capsys.readouterr().err


def test_both_files_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_batch(["--input", "x"])
    assert "foretoken: error: --output is missing" in capsys.readouterr().err
