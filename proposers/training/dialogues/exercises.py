"""Programming exercises with solutions: those of exercism, and short programs asked for by what they do or what they are called."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from random import Random

from ..corpus import Conversation, Record
from .common import fenced, pair
from .python_source import Function, compiles, functions_of, without_comments

MOST_LINES, MOST_CHARS = 40, 1100    # of a solution
MOST_INSTRUCTION_CHARS = 700
SOLVE = (
    "{}\n\nSolve this in Python.", "{}\n\nWrite a Python solution.", "Solve this exercise in Python:\n\n{}", "Programming exercise: {}",
    "{}\n\nHow would you do this in Python?",
)
DOES = (
    "Write a Python function for this: {}", "Write a function in Python. {}", "{} Write it in Python.", "Python: {}",
    "Can you write a Python function? {}", "I need some Python code. {}", "Please write this in Python: {}",
)
CALLED = (
    "Write {} in Python.", "Implement {} in Python.", "Can you write {} in Python?", "Show me Python code for {}.",
    "Python code for {}, please.", "How do I implement {} in Python?",
)
VAGUE = {"main", "solution", "setup", "run", "init", "driver", "solve", "check", "helper"}


def exercises(records: Iterable[Record]) -> Iterator[Conversation]:
    """Instructions and example solution of each exercise; functions that stand alone by their first sentence, and by their name."""
    records = list(records)
    yield from _exercism(records)
    for function in functions_of(records):
        program = function.program
        if program is None or function.name in VAGUE or len(program) > MOST_CHARS:
            continue
        program = without_comments(program)
        chance = Random(function.key)
        if function.summary:
            yield pair(function.key, chance.choice(DOES).format(function.summary), fenced("python", program))
        if _telling(function):
            yield pair(function.key, chance.choice(CALLED).format(function.name.replace("_", " ")), fenced("python", program))


def _telling(function: Function) -> bool:
    """Whether the name says what is wanted: "bubble_sort", not "calc2"."""
    return re.fullmatch(r"[a-z]{3,}(_[a-z]{2,}){1,3}", function.name) is not None and len(function.source) > 80


def _exercism(records: list[Record]) -> Iterator[Conversation]:
    folders: dict[str, dict[str, Record]] = defaultdict(dict)
    for record in records:
        match = re.fullmatch(r"(exercises/\w+/[^/]+)/(\.docs/instructions\.md|\.meta/ex\w+\.py)", record.origin)
        if match:
            folders[match[1]][PurePosixPath(match[2]).suffix] = record
    for files in folders.values():
        if len(files) == 2:
            record, task, solution = files[".md"], _instructions(files[".md"].text), _solution(files[".py"].text)
            if task and solution:
                yield pair(record.key, Random(record.key).choice(SOLVE).format(task), fenced("python", solution))


def _instructions(page: str) -> str:
    """Whole paragraphs without heading, notes and links, as many as fit."""
    page = re.sub(r"^~~~~.*?^~~~~$", "", page, flags=re.S | re.M)
    page = re.sub(r"^#.*\n|^\[[^\]]+\]:.*\n?", "", page, flags=re.M)
    page = re.sub(r"\[([^\]]+)\](\[[^\]]*\]|\([^)]*\))", r"\1", page)
    chosen: list[str] = []
    for paragraph in re.split(r"\n\s*\n", page.strip()):
        if sum(map(len, chosen)) + len(paragraph) > MOST_INSTRUCTION_CHARS:
            break
        chosen.append(paragraph.strip())
    return "\n\n".join(chosen)


def _solution(text: str) -> str:
    """Without comments, docstrings and what only runs as a script; "" if it is long or does not compile."""
    if not compiles(text):
        return ""
    tree = ast.parse(text)
    gone: set[int] = set()
    for node in ast.walk(tree):
        match node:
            case ast.If(ast.Compare(ast.Name("__name__"))):
                gone |= set(range(node.lineno, (node.end_lineno or 0) + 1))
            case ast.FunctionDef() | ast.ClassDef() | ast.Module() if ast.get_docstring(node) is not None and len(node.body) > 1:
                gone |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
            case _:
                pass
    lines = [line.rstrip() for number, line in enumerate(text.splitlines(), 1) if number not in gone]
    short = "\n".join(lines).strip()
    if not short or len(lines) > 3 * MOST_LINES or not compiles(short):
        return ""
    short = re.sub(r"(:\n)\n+|\n{4,}", lambda match: match[1] or "\n\n\n", without_comments(short).strip())
    return short if short.count("\n") < MOST_LINES and len(short) <= MOST_CHARS and compiles(short) else ""
