"""Which held-out prompts are kept beside the weights, and in what shape."""

import json
from pathlib import Path

import pytest

from foretoken.proposers.training.encoding import Prompt
from foretoken.server.bench.prompt_sets import read
from foretoken.server.train.prompts import PER_CATEGORY, code_of, write_prompts

CODE = "```python\nx = 1\n```"


def asked(text: str, *tools: object) -> Prompt:
    return Prompt([{"role": "user", "content": text}], list(tools), {"role": "assistant", "content": "Well."})


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.jsonl.gz"])
def test_the_file_is_a_prompt_set(tmp_path: Path, name: str) -> None:
    prompts = [("edits", asked(f"Rename x to y{number}.\n\n{CODE}")) for number in range(3)]
    prompts += [("talk", asked(f"Hello {number}")) for number in range(100)]
    prompts += [("tools", asked("What is the weather?")), ("talk", asked("Ring me", {"type": "function"}))]
    write_prompts(tmp_path / name, prompts, 0)
    found = read(tmp_path / name)
    assert [one.category for one in found] == ["edits"] * 3 + ["chat"] * (PER_CATEGORY // 3)
    assert {one.prediction for one in found} == {CODE, None}
    assert all("Ring" not in one.turns[0] for one in found), "prompts with tools are no plain questions"


def test_the_same_seed_chooses_the_same(tmp_path: Path) -> None:
    prompts = [("json", asked(f"{number} as JSON")) for number in range(90)]
    texts: list[str] = []
    for number, seed in enumerate((0, 0, 1)):
        write_prompts(tmp_path / f"{number}.jsonl", prompts, seed)
        texts.append((tmp_path / f"{number}.jsonl").read_text())
    assert texts[0] == texts[1] != texts[2]
    assert len([json.loads(line) for line in texts[0].splitlines()]) == PER_CATEGORY


@pytest.mark.parametrize(("text", "code"), [(f"Do it.\n{CODE}", CODE), ("no code", ""), (f"{CODE} and {CODE}", "")])
def test_only_a_single_block_can_be_predicted(text: str, code: str) -> None:
    assert code_of(text) == code
