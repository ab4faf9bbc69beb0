"""Code edits: a function and what shall be changed in it; the answer mostly copies. Owns how they are asked for and answered."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from random import Random

from ..corpus import Conversation, Record
from .common import fenced, pair
from .python_source import compiles, functions_of
from .refactorings import Edit, comments, docstring, parameter, prints, quotes, rename, statement, type_hints, value
from .slips import fix
from .small_exercises import sample_functions

Maker = Callable[[str, Random], Edit | None]

MAKERS: tuple[tuple[Maker, float], ...] = (
    (rename, 6), (fix, 6), (type_hints, 4), (docstring, 3), (comments, 3), (value, 2), (parameter, 2), (statement, 2), (prints, 2),
    (quotes, 1),
)
"""With how often each is tried before the others."""
CHAINED: tuple[Maker, ...] = (rename, value, parameter, statement)
PER_FUNCTION = 3
INTRODUCTIONS = (
    "Here is my code:", "I have this function:", "Look at this function:", "This is my function:", "I wrote this:", "Given this code:",
)
UNDO = ("Undo that.", "Change it back, please.", "Now undo this change.", "No, change it back.")


def edits(records: Iterable[Record]) -> Iterator[Conversation]:
    """A few different edits of every function, and now and then several of them one after the other."""
    for function in chain(sample_functions(), functions_of(records)):
        for number, edit in enumerate(_different(function.source, Random(f"{function.key} edits"))):
            chance = Random(f"{function.key} {number} told")
            yield pair(function.key, _question(edit, chance), _answer(edit))
        chance = Random(f"{function.key} chain")
        if len(function.source) < 450 and chance.random() < 0.2:
            yield from _chain(function.key, function.source, chance)


def _different(source: str, chance: Random) -> Iterator[Edit]:
    """Edits of up to PER_FUNCTION kinds."""
    makers = sorted(MAKERS, key=lambda weighted: chance.random() ** (1 / weighted[1]), reverse=True)
    made = (_made(maker, source, chance) for maker, _ in makers)
    for _, edit in zip(range(PER_FUNCTION), filter(None, made), strict=False):
        yield edit


def _made(maker: Maker, source: str, chance: Random) -> Edit | None:
    edit = maker(source, chance)
    return edit if edit is not None and edit.before != edit.after and compiles(edit.after) else None


def _question(edit: Edit, chance: Random) -> str:
    code = fenced("python", edit.before) if chance.random() < 0.92 else edit.before
    draw = chance.random()
    if draw < 0.55:
        return f"{edit.ask}\n\n{code}"
    if draw < 0.85:
        return f"{code}\n\n{edit.ask}"
    return f"{chance.choice(INTRODUCTIONS)}\n\n{code}\n\n{edit.ask}"


def _answer(edit: Edit) -> str:
    code = fenced("python", edit.after)
    return f"{code}\n\n{edit.remark}" if edit.remark else code


def _chain(key: int, source: str, chance: Random) -> Iterator[Conversation]:
    """An edit, and then a second one of its outcome, or back again."""
    first = _made(chance.choice(CHAINED), source, chance)
    if first is None:
        return
    second = _made(chance.choice(CHAINED), first.after, chance) if chance.random() < 0.75 else None
    ask, after = (chance.choice(UNDO), source) if second is None else (second.ask, second.after)
    more = [{"role": "user", "content": ask}, {"role": "assistant", "content": fenced("python", after)}]
    yield Conversation([*pair(key, _question(first, chance), _answer(first)).messages, *more], key)
