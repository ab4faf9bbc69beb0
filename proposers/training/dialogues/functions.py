"""From a docstring to its function: the first lines are given, or the signature and what it is for."""

from collections.abc import Iterable, Iterator
from itertools import chain
from random import Random

from ..corpus import Conversation, Record
from .common import fenced, pair
from .python_source import Function, functions_of, without_comments
from .small_exercises import sample_functions

MOST_FOREIGN = 1                     # names of its file that a function may use: more cannot be guessed
COMPLETE = (
    "Complete this function.", "Write the body of this function.", "Implement this function:", "Finish this Python function.",
    "Fill in this function:", "Can you complete this code?", "Complete the code:", "Please implement this.",
)
WRITE = (
    "Write a Python function `{}`: {}", "Write `{}` in Python. {}", "Implement `{}`. {}", "I need a function `{}`. {}",
    "Write the function `{}`. {}", "Python function `{}`: {}",
)


def functions(records: Iterable[Record]) -> Iterator[Conversation]:
    """The answer is the whole function, docstring included."""
    seen: set[int] = set()
    for function in chain(sample_functions(), functions_of(records)):
        if function.summary and function.key not in seen and len(_unknown(function)) <= MOST_FOREIGN:
            seen.add(function.key)
            yield pair(function.key, _question(function), fenced("python", without_comments(function.source)))


def _unknown(function: Function) -> list[str]:
    return [name for name in function.foreign if name not in function.imports]


def _question(function: Function) -> str:
    chance = Random(function.key)
    draw = chance.random()
    if draw < 0.5:
        return f"{chance.choice(COMPLETE)}\n\n{fenced('python', function.head)}"
    if draw < 0.6:
        return f"{fenced('python', function.head)}\n\n{chance.choice(COMPLETE).rstrip(':')}"
    return chance.choice(WRITE).format(function.signature, function.summary)
