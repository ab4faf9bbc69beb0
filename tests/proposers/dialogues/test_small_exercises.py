import ast
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest

from foretoken.proposers.training.dialogues.small_exercises import Wish, imperative, small_exercises
from foretoken.proposers.training.dialogues.small_functions import TASKS
from foretoken.proposers.training.dialogues.small_programs import PROGRAMS

DIALOGUES = list(small_exercises(()))
TURNS = [
    (dialogue.messages[place - 1]["content"], message["content"])
    for dialogue in DIALOGUES for place, message in enumerate(dialogue.messages) if message["role"] == "assistant"
]

FIRST = [tuple(m["content"] for m in d.messages if m["role"] != "system")[:2] for d in DIALOGUES]


def block(answer: str) -> str:
    match = re.match(r"```python\n(.*?)\n```", answer, flags=re.S)
    assert match, answer
    return match[1]


def run(code: str) -> dict[str, Any]:
    space: dict[str, Any] = {"print": lambda *_: None}       # nothing of it should be seen
    exec(code, space)
    return space


def test_there_are_thousands_and_none_twice():
    assert len(TASKS) >= 60
    assert 4000 < len(DIALOGUES) < 6000
    assert len({str([m for m in d.messages if m["role"] != "system"]) for d in DIALOGUES}) == len(DIALOGUES)
    assert len({dialogue.key for dialogue in DIALOGUES}) > 0.8 * len(DIALOGUES)


def test_the_same_every_time():
    assert [d.messages for d in small_exercises(())] == [d.messages for d in DIALOGUES]


def test_every_answer_is_short_compiling_python_without_unfilled_places():
    for question, answer in TURNS:
        assert len(answer) < 900 and "$" not in question + answer
        ast.parse(block(answer))


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.asks[0])
def test_functions_do_what_their_table_says(task: Any):
    """Under every name, parameter and number of it that was drawn."""
    checked = 0
    asks = [re.escape(ask).replace(r"\$n", r"(?P<n>-?\d+)").replace(r"\$w", "(?P<w>.*?)") for ask in task.asks]
    patterns = [re.compile(rf"function (?:in Python )?that {ask}[.?,]") for ask in asks]
    for question, answer in FIRST:
        match = next((match for pattern in patterns if (match := pattern.search(question))), None)
        if match is None:
            continue
        function = next(node for node in ast.parse(block(answer)).body if isinstance(node, ast.FunctionDef))
        assert len(function.args.args) == len(task.parameters)
        if task.case is not None:
            arguments, result = task.case
            for place, value in match.groupdict().items():
                arguments, result = arguments.replace(f"${place}", value), result.replace(f"${place}", value)
            space = run(block(answer))
            assert eval(f"{function.name}({arguments})", space) == eval(result)
        checked += 1
    assert checked >= 10


def usual(asked: str, **places: str) -> Any:
    """The function of the task that is asked for in these words, under its usual names."""
    task = next(task for task in TASKS if asked in task.asks)
    wish = Wish(task, task.names.split()[0], tuple(names[0] for names, _ in task.parameters), places, asked)
    return run(wish.code)[wish.name]


def test_functions_on_files_read_what_was_written(tmp_path: Path):
    path = str(tmp_path / "notes.txt")
    usual("writes a text to a file")(path, "one\n")
    usual("appends a line to a file")(path, "two")
    assert usual("reads a text file")(path) == "one\ntwo\n"
    assert usual("reads a file into a list of lines")(path) == ["one", "two"]
    assert usual("counts the lines of a file")(path) == 2
    assert usual("checks if a file exists")(path) and not usual("checks if a file exists")(path + "x")
    data = str(tmp_path / "data.json")
    usual("writes data to a JSON file with an indent of $n", n="4")(data, {"a": 1})
    assert Path(data).read_text() == '{\n    "a": 1\n}' and usual("reads a JSON file")(data) == {"a": 1}
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    assert usual("reads a CSV file into a list of dictionaries")(str(tmp_path / "rows.csv")) == [{"a": "1", "b": "2"}]
    assert usual("lists the files of a folder that end with $w", w=".csv")(str(tmp_path)) == ["rows.csv"]


@pytest.mark.parametrize("asked, number, places, lines", [
    ("counts down from n to 1", 3, {}, ["3", "2", "1"]),
    ("plays FizzBuzz up to n", 5, {}, ["1", "2", "Fizz", "4", "Buzz"]),
    ("prints the times table up to $n", 3, {"n": "2"}, ["3 x 1 = 3", "3 x 2 = 6"]),
])
def test_functions_that_print(asked: str, number: int, places: dict[str, str], lines: list[str], capsys: pytest.CaptureFixture[str]):
    function = usual(asked, **places)
    function.__globals__["print"] = print
    function(number)
    assert capsys.readouterr().out.splitlines() == lines


def test_wishes_are_fulfilled():
    for question, answer in FIRST:
        code = block(answer)
        if name := re.search(r"(?:Call it|Name it|be called|Its name is) `?(\w+)", question):
            assert f"def {name[1]}(" in code
        if taken := re.search(r"(?:parameter is called|the parameter|It takes|Call the argument) `(\w+)`\.", question):
            assert f"({taken[1]}" in code
        assert ("type hints" in question or "type annotations" in question) == ("->" in code), question
        assert ("docstring" in question) == ('"""' in code), question


def test_examples_of_calls_print_what_is_said():
    seen = 0
    for dialogue in DIALOGUES:
        answers = [message["content"] for message in dialogue.messages if message["role"] == "assistant"]
        if len(answers) == 2 and (said := re.search(r"This prints `(.*)`\.$", answers[1], flags=re.S)):
            printed: list[str] = []
            exec(f"{block(answers[0])}\n{block(answers[1])}", {"print": lambda value, into=printed: into.append(str(value))})
            assert printed == [said[1]]
            seen += 1
    assert seen > 50


def test_a_rename_afterwards_leaves_only_the_new_name():
    seen = 0
    for dialogue in DIALOGUES:
        *_, first, question, second = ["", *(message["content"] for message in dialogue.messages)]
        if match := re.fullmatch(r"(?:Now rename|Rename) `(\w+)` to `(\w+)`\.|Use the name `(\w+)` instead of `(\w+)`\.", question):
            old, new = (match[1], match[2]) if match[1] else (match[4], match[3])
            tree = ast.parse(block(first))
            for node in ast.walk(tree):                      # names only: a docstring may well keep the word
                if isinstance(node, ast.Name) and node.id == old:
                    node.id = new
                elif isinstance(node, ast.arg) and node.arg == old:
                    node.arg = new
            assert block(first) != block(second)
            assert ast.dump(tree) == ast.dump(ast.parse(block(second)))
            seen += 1
    assert seen > 20


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs_vary_and_repeat_from_the_same_seed(program: Any):
    drawn = {program(Random(seed)) for seed in range(40)}
    assert len(drawn) > 20 and program(Random(7)) == program(Random(7))


def test_programs_run_and_have_what_was_asked_for():
    for question, answer in FIRST:
        if match := re.search(r"numbers from (\d+) to (\d+)(?: in steps of (\d+))?", question):
            printed: list[int] = []
            if "print(number)" in answer:
                exec(block(answer), {"print": printed.append})
                assert printed == list(range(int(match[1]), int(match[2]) + 1, int(match[3] or 1)))
        if match := re.match(r"Define a class called (\w+) with the attributes? (.+)\.", question):
            fields = re.split(r", | and ", match[2])
            made = run(block(answer))[match[1]](*range(len(fields)))
            assert vars(made) == {field: place for place, field in enumerate(fields)}
        if match := re.match(r"I need a dataclass (\w+) with (.+?)( and default values)?\.", question):
            fields = re.split(r", | and ", match[2])
            made = run(block(answer))[match[1]](*([] if match[3] else range(len(fields))))
            assert list(vars(made)) == fields


@pytest.mark.parametrize("doing, done", [
    ("returns the sum", "Return the sum"), ("multiplies two numbers", "Multiply two numbers"),
    ("is a recursive factorial", "Recursive factorial"), ("does a binary search", "Do a binary search"),
])
def test_docstrings_tell_to_do_it(doing: str, done: str):
    assert imperative(doing) == done
