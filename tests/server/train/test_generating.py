from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from foretoken.proposers.training.reading import DataError
from foretoken.server.train import generating
from foretoken.server.train.generating import TEMPERATURES, Answer, Generation, documents, generate, read_answers

PROMPTS = [[5 + number, 40, 41 + number, 90] for number in range(9)]
SETTINGS = Generation(answer_tokens=12, max_num_seqs=4)


def by_number(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in sorted(answers, key=lambda answer: answer.number)]


@pytest.fixture(scope="module")
def whole(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a run from beginning to end."""
    path = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    generate(str(tiny_target), PROMPTS, path, SETTINGS)
    return path


def test_half_is_greedy_and_right_and_half_is_sampled(whole: Path, tiny_target: Path) -> None:
    answers = sorted(read_answers(whole), key=lambda answer: answer.number)
    assert [answer.prompt_token_ids for answer in answers] == PROMPTS
    assert [answer.temperature for answer in answers] == [*TEMPERATURES] * 4 + [0.0]
    assert all(0 < len(answer.token_ids) <= 12 for answer in answers)
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    for answer in answers[::2]:
        ids = [*answer.prompt_token_ids, *answer.token_ids]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, len(PROMPTS[0]) - 1 : -1]
        chosen = logits.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert bool((logits.amax(-1) - chosen < 0.1).all()), "the target's own choice, but for rounding"


def test_a_killed_run_goes_on_where_it_stopped(whole: Path, tiny_target: Path, tmp_path: Path) -> None:
    lines = whole.read_bytes().splitlines(keepends=True)
    path = tmp_path / "answers.jsonl"
    path.write_bytes(b"".join(lines[:4]) + lines[4][:17])
    answers = generate(str(tiny_target), PROMPTS, path, SETTINGS)
    assert [answer.number for answer in answers] == list(range(9)) and by_number(answers) == by_number(read_answers(whole))
    assert path.read_bytes().startswith(b"".join(lines[:4])) and len(path.read_bytes().splitlines()) == 9


def test_a_finished_file_needs_no_engine(whole: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(generating, "boot")
    assert by_number(generate(str(tiny_target), PROMPTS, whole, SETTINGS)) == by_number(read_answers(whole))


def test_answers_of_others_are_refused(whole: Path, tiny_target: Path, tiny_draft: Path) -> None:
    with pytest.raises(DataError, match="another model"):
        generate(str(tiny_draft), PROMPTS, whole, SETTINGS)
    with pytest.raises(DataError, match="other prompts"):
        generate(str(tiny_target), PROMPTS[::-1], whole, SETTINGS)


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"number": 0}\n')
    with pytest.raises(DataError, match=f"{path}:1: is no answer"):
        read_answers(path)


def test_a_prompt_that_fills_the_context_has_no_answer(tiny_target: Path, tmp_path: Path) -> None:
    """The context has 512 tokens."""
    answers = generate(str(tiny_target), [[7] * 600, [7] * 508], tmp_path / "answers.jsonl", SETTINGS)
    assert answers[0].token_ids == [] and 0 < len(answers[1].token_ids) <= 4
    [document] = documents(answers)
    assert document.learn.tolist() == [0] * 508 + [1] * len(answers[1].token_ids)
    assert document.token_ids.tolist() == [7] * 508 + answers[1].token_ids
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 2
