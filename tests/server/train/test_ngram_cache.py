"""`foretoken train ngram-cache` on the embedded target: from a few chats to a folder that serves beside it, and the same answers again."""

import json
from pathlib import Path

import pytest
from fixed_k import fixed

from foretoken.engine.config import DEMO_MODEL
from foretoken.engine.llm import LLM
from foretoken.engine.request import SamplingParams
from foretoken.server.exit_status import CONFIG, DATA, USAGE
from foretoken.server.train import generating
from foretoken.server.train.command import main


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    asked = [f"Return {number} {thing} as a JSON array." for number in (2, 3, 4, 5) for thing in ("fruits", "colors", "animals", "cities")]
    lines = [{"messages": [{"role": "user", "content": one}, {"role": "assistant", "content": "[]"}]} for one in asked]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_mistake_that_ended_the_command_before_its_work_is_not_held_against_the_next(
    chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cache"
    assert main([*command(chats, out)[:2], str(tmp_path / "modle"), *command(chats, out)[3:]]) == CONFIG
    assert "modle" in capsys.readouterr().err
    for _ in range(2):
        assert main(command(tmp_path / "chast.jsonl", out)) == DATA
        assert "there is no such file or folder" in capsys.readouterr().err


def test_prompts_without_answers_will_do(chats: Path, tmp_path: Path) -> None:
    asked = [{"messages": json.loads(line)["messages"][:1]} for line in chats.read_text().splitlines()]
    chats.write_text("".join(json.dumps(line) + "\n" for line in asked))
    assert main(command(chats, tmp_path / "cache")) == 0
    assert (tmp_path / "cache.work" / "answers.jsonl").read_bytes().count(b"\n") == len(asked)


def command(chats: Path, out: Path, *flags: str) -> list[str]:
    return ["ngram-cache", "--model", DEMO_MODEL, "--data", str(chats), "--out", str(out), "--answer-tokens", "24", *flags]


def test_a_cache_is_counted_in_answers_of_the_target_and_served(
    chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "cache"
    assert main(command(chats, out)) == 0
    said = capsys.readouterr().out
    assert "runs of up to 4 tokens" in said and "held" in said
    speculation = json.dumps({"method": "ngram_cache", "model": str(out)})
    assert f"foretoken serve {DEMO_MODEL} --speculative-config '{speculation}'" in said
    work = out.with_name("cache.work")
    answers = (work / "answers.jsonl").read_bytes()
    assert answers.count(b"\n") == 16 and json.loads((out / "config.json").read_text())["max_n"] == 4

    greedy = SamplingParams(temperature=0, max_tokens=16)
    asked = [[{"role": "user", "content": "Return 6 birds as a JSON array."}]]
    with LLM(DEMO_MODEL, fixed({**json.loads(speculation), "num_speculative_tokens": 3})) as llm:
        drafted = llm.chat(asked, greedy, use_tqdm=False)
        assert llm.stats().num_accepted_tokens > 0
    with LLM(DEMO_MODEL, {"method": "off"}) as llm:
        plain = llm.chat(asked, greedy, use_tqdm=False)
    assert drafted[0].outputs[0].token_ids == plain[0].outputs[0].token_ids

    def not_again(*_: object) -> None:
        raise AssertionError("answers are kept")

    monkeypatch.setattr(generating, "boot", not_again)
    assert main(command(chats, out, "--max-n", "2", "--max-runs", "10")) == 0
    assert json.loads((out / "config.json").read_text())["max_n"] == 2 and (work / "answers.jsonl").read_bytes() == answers
    assert main(command(chats, out, "--seed", "3")) == DATA
    assert "was begun with seed 0" in capsys.readouterr().err
    assert main(command(chats, out, "--min-count", "10k")) == DATA
    assert "no run of tokens comes 10,000 times" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--max-n", "9"], "--max-n 9 is above 8"), (["--max-runs", "0"], "'0' is not a whole number"), (["--tokens", "5"], "--tokens")],
)
def test_mistakes_in_flags_are_one_line(flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(command(tmp_path / "none", tmp_path / "out", *flags))
    said = capsys.readouterr().err
    assert ended.value.code == USAGE and message in said and said.count("\n") == 1
