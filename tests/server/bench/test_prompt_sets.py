import gzip
import json
from pathlib import Path

import pytest

from foretoken.server.bench.prompt_sets import ALL, OWN, PUBLISHED, Prompt, PromptSetError, load, random_words, read

TASK = {
    "task_id": "Python/7", "prompt": "def add(a, b):\n", "declaration": "def add(a, b):\n", "buggy_solution": "    return a - b\n",
    "entry_point": "add", "example_test": "assert add(1, 2) == 3\n",
}


@pytest.mark.parametrize("name", OWN)
def test_our_own_sets(name: str) -> None:
    prompts = load(name)
    assert len(prompts) == len({prompt.turns for prompt in prompts}) == 24
    assert all(prompt.category == name and all(turn.strip() for turn in prompt.turns) for prompt in prompts)
    assert max(len(turn) for prompt in prompts for turn in prompt.turns) < 1600  # a small model's context has room for it


def test_our_own_sets_have_what_they_are_for() -> None:
    assert len(load(ALL)) == 24 * len(OWN)
    assert any(len(prompt.turns) > 1 for prompt in load("chat"))
    assert all(prompt.prediction and prompt.prediction in prompt.turns[0] for prompt in load("edits"))


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"question_id": 81, "category": "writing", "turns": ["Say a.", "Say b."]}, Prompt(("Say a.", "Say b."), "writing")),
        ({"prompt": "def f():", "canonical_solution": "..."}, Prompt(("def f():",))),
        ({"text": "Hello"}, Prompt(("Hello",))),
        ("Hello", Prompt(("Hello",))),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]}, Prompt(("Hello",))),
        (
            {
                "messages": [
                    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "One?"}, {"role": "assistant", "content": "1"},
                    {"role": "user", "content": "Two?"},
                ]
            },
            Prompt(("One?", "Two?"), system="Be brief."),
        ),
        ({"id": "x", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]}, Prompt(("Hi",))),
    ],
)
def test_every_published_shape(record: object, expected: Prompt, tmp_path: Path) -> None:
    lines, array, packed = tmp_path / "a.jsonl", tmp_path / "a.json", tmp_path / "a.jsonl.gz"
    lines.write_text(f"{json.dumps(record)}\n\n{json.dumps(record)}\n")
    array.write_text(json.dumps([record, record], indent=2))
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    assert read(lines) == read(array) == read(packed) == load(str(lines)) == load("spec_bench", packed) == [expected, expected]


def test_a_task_of_humanevalfix_shows_the_code_and_predicts_it(tmp_path: Path) -> None:
    (tmp_path / "fix.jsonl").write_text(json.dumps(TASK))
    (prompt,) = read(tmp_path / "fix.jsonl")
    assert prompt.prediction == "def add(a, b):\n    return a - b\n" and prompt.prediction in prompt.turns[0]
    assert prompt.turns[0].startswith("Fix bugs in add.") and "assert add(1, 2) == 3" in prompt.turns[0]


def test_plain_text_has_a_prompt_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("[one\n\ntwo\n")
    assert read(tmp_path / "a.txt") == [Prompt(("[one",)), Prompt(("two",))]
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")  # as Windows writes it
    assert read(tmp_path / "a.txt") == [Prompt(("one",)), Prompt(("two",))]
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n{"text": "two"}\r\n')
    assert read(tmp_path / "a.jsonl") == [Prompt(("one",)), Prompt(("two",))]


def test_a_conversation_without_a_user_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"messages": [{"role": "assistant", "content": "Hi"}]}\n{"text": "a\u2028b"}\n')
    assert read(path) == [Prompt(("a\u2028b",))]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_set_says_where_to_get_it(name: str) -> None:
    with pytest.raises(PromptSetError, match="download https://.* and give the file with --dataset-path"):
        load(name)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "has no prompts"),
        (b'{"text": "a"}\n{"text": \n', "line 2 is no JSON.*one object a line"),
        (b"[1, 2", "is no JSON"),
        (b'{"answer": 42}', "line 1 has none of the fields that hold a prompt: turns, messages"),
        (b'[{"text": "a"}, 7]', "record 2 has none of the fields"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_files_that_are_no_prompt_sets(content: bytes, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(PromptSetError, match=complaint):
        read(tmp_path / "a.jsonl")


def test_names_and_paths_that_do_not_exist(tmp_path: Path) -> None:
    with pytest.raises(PromptSetError, match="'chats': give a file, or one of edits, json, chat"):
        load("chats")
    with pytest.raises(PromptSetError, match="cannot be read"):
        load("chat", tmp_path / "missing.jsonl")
    with pytest.raises(PromptSetError, match="--dataset-path FILE"):
        load("custom")
    (tmp_path / "a.json.gz").write_bytes(b"not packed")
    with pytest.raises(PromptSetError, match="cannot be read"):
        read(tmp_path / "a.json.gz")


def test_random_words_are_repeatable_and_without_order() -> None:
    first = random_words(3, 50, seed=1)
    assert first == random_words(3, 50, seed=1) != random_words(3, 50, seed=2)
    assert [len(prompt.turns[0].split()) for prompt in first] == [50, 50, 50] and len({prompt.turns for prompt in first}) == 3
