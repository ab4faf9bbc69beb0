"""`foretoken generate` on a tiny model."""

import io
import json
import re
from pathlib import Path

import pytest

from foretoken import LLM, SamplingParams
from foretoken.server.generate_command import generate

FLAGS = ("--dtype", "float32", "--threads", "1", "--kv-cache-gb", "0.01")
QUESTION = "one two one two"


@pytest.fixture(scope="module")
def expected(tiny_target: Path) -> tuple[str, str]:
    """What the engine says by itself, to the question and behind the raw text."""
    with LLM(tiny_target, {"method": "off"}, dtype="float32", threads=1, kv_cache_gb=0.01) as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        chat = llm.chat([{"role": "user", "content": QUESTION}], params, use_tqdm=False)
        return chat[0].outputs[0].text, llm.generate(QUESTION, params, use_tqdm=False)[0].outputs[0].text


def itself(model: Path) -> str:
    """A drafter that guesses what the target says."""
    drafter = {"method": "draft_model", "model": str(model), "quantization": "none", "num_speculative_tokens": 3, "adaptive": False}
    return json.dumps(drafter)


def test_the_answer_goes_to_stdout_and_the_figures_to_stderr(
    tiny_target: Path, expected: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert generate([QUESTION, str(tiny_target), "--max-tokens", "12", *FLAGS]) == 0
    told = capsys.readouterr()
    assert told.out == expected[0] + "\n"
    assert re.search(r"^\[\d+ tokens, [\d,]+ tokens/s; \d\.\d\d a pass.*\]$", told.err, re.MULTILINE) and "\x1b" not in told.err
    monkeypatch.setattr("sys.stdin", io.StringIO(QUESTION + "\n"))
    assert generate(["--raw", "-", "--model", str(tiny_target), "--max-tokens", "12", *FLAGS]) == 0
    assert capsys.readouterr().out == expected[1] + "\n"
    of_template = ["--chat-template", "{{ date_string }}", f"--default-chat-template-kwargs.date_string={QUESTION}"]
    assert generate(["Hi", str(tiny_target), "--max-tokens", "12", *of_template, *FLAGS]) == 0
    assert capsys.readouterr().out == expected[1] + "\n"


def test_steps_show_what_each_accepted_and_said(tiny_target: Path, expected: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["-sc", itself(tiny_target), "--show-steps", "--max-tokens", "12", *FLAGS]
    assert generate([QUESTION, str(tiny_target), *flags]) == 0
    *steps, last = capsys.readouterr().out.splitlines()
    found = [re.fullmatch(r" +(\d+)  Draft: [\d.]+ ms, verify: [\d.]+ ms, (.*?) +'(.*)'", line) for line in steps]
    assert [int(step[1]) for step in found if step] == [*range(1, len(steps) + 1)]
    assert any("accepted 3/3" in step[2] for step in found if step)
    assert "".join(step[3] for step in found if step) == repr(expected[0])[1:-1]
    assert "of guesses accepted" in last and len(steps) < 12


def test_json_tells_everything(tiny_target: Path, expected: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["-sc", itself(tiny_target), "--json", "--show-steps", "--max-tokens", "12", "--speculation", "draft_model", *FLAGS]
    assert generate([QUESTION, str(tiny_target), *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["text"] == expected[0] and report["prompt"] == QUESTION
    assert report["usage"]["completion_tokens"] == len(report["token_ids"]) == len(report["proposers"])
    assert report["proposers"].count("draft_model") == report["metrics"]["num_accepted_draft_tokens"] > 0
    assert sum(step["accepted"] for step in report["steps"]) >= report["metrics"]["num_accepted_draft_tokens"]


def test_mistakes(tiny_target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    three, told = ["-sc.method", "ngram", "--", "-a", "b", "c"], "one PROMPT and one MODEL at most, not -a b c"
    for argv, words in [([], "which PROMPT?"), ([""], "the PROMPT is empty"), (three, told)]:
        with pytest.raises(SystemExit, match="2"):
            generate(argv)
        assert capsys.readouterr().err.startswith(f"foretoken: error: {words}")
    assert generate([QUESTION, str(tiny_target), "--speculation", "eagle9", *FLAGS]) == 2
    assert "this server has 'auto', 'off'" in capsys.readouterr().err
    assert generate([QUESTION, str(tiny_target), "--raw", "--system", "Be brief.", *FLAGS]) == 2
    assert "leave --system away" in capsys.readouterr().err
