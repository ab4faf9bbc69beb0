"""Small programming exercises made from rules: a function or a short program is asked for, with the names and numbers it shall have.

What the answer is can be read off the question: usual names unless others are given, type hints, a docstring and an explanation only
when they are asked for. Sometimes a change of the code is asked for afterwards.
"""

import ast
import operator
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from random import Random
from string import Template
from textwrap import indent

from ..corpus import Conversation, Record, content_key
from .common import fenced, pair
from .python_source import Function
from .small_functions import TASKS, Task
from .small_programs import PROGRAMS, listed

PER_TASK = 38
PER_PROGRAM = 100
SAMPLES_PER_TASK = 8

QUESTIONS = (
    "Write a Python function that {}.", "Write a function that {}.", "Can you write a Python function that {}?",
    "I need a Python function that {}.", "Give me a Python function that {}.", "Please write a function in Python that {}.",
    "Write Python code for a function that {}.", "Implement a Python function that {}.", "Python: a function that {}.",
    "Could you write a function that {}?",
)
EXPLAINED = (
    "How do I write a Python function that {}?", "Show me a Python function that {}, and explain it.",
    "Write a Python function that {}. Explain it briefly.", "Write and explain a Python function that {}.",
)
CALLED = ("Call it `{}`.", "Name it `{}`.", "The function should be called {}.", "Its name is `{}`.")
TAKING = ("The parameter is called {}.", "Name the parameter {}.", "It takes {}.", "Call the argument {}.")
TAKING_MORE = ("The parameters are called {}.", "Name the parameters {}.", "It takes {}.", "Call the arguments {}.")
HINTED = ("Use type hints.", "Add type hints.", "With type hints, please.", "Include type annotations.")
DOCUMENTED = ("Add a docstring.", "Include a docstring.", "With a docstring, please.", "Write a docstring too.")


@dataclass(frozen=True)
class Wish:
    """A task with everything in it settled."""

    task: Task
    name: str
    parameters: tuple[str, ...]
    fill: dict[str, str]             # $n and $w
    doing: str                       # "returns the sum of a list of numbers"
    hints: bool = False
    docstring: bool = False

    def filled(self, text: str) -> str:
        places = dict(zip("xyz", self.parameters, strict=False))
        return Template(text).substitute(self.fill, f=self.name, **places)

    @property
    def summary(self) -> str:
        return f"{imperative(self.filled(self.doing))}."

    @property
    def code(self) -> str:
        kinds = [kind for _, kind in self.task.parameters]
        parameters = [f"{name}: {kind}" if self.hints else name for name, kind in zip(self.parameters, kinds, strict=True)]
        result = f" -> {self.task.gives}" if self.hints else ""
        body, imports = self.filled(self.task.body), ""
        if body.startswith("import "):               # stands at the top of the file
            imports, _, body = body.partition("\n\n")
            imports += "\n\n\n"
        if self.docstring:
            body = f'"""{self.summary}"""\n{body}'
        return f"{imports}def {self.name}({', '.join(parameters)}){result}:\n{indent(body, '    ')}"


def small_exercises(_: Iterable[Record]) -> Iterator[Conversation]:
    """Every task in many wordings, and programs put together from parts."""
    seen: set[str] = set()
    for number, task in enumerate(TASKS):
        for draw in range(PER_TASK):
            conversation = _about(task, Random(f"{number} {draw}"))
            if (question := str(conversation.messages)) not in seen:
                seen.add(question)
                yield conversation
    for number, program in enumerate(PROGRAMS):
        for draw in range(PER_PROGRAM):
            question, answer = program(Random(f"program {number} {draw}"))
            if question not in seen:
                seen.add(question)
                yield pair(content_key(question), question, answer)


def sample_functions() -> Iterator[Function]:
    """The tasks as functions, each with several names, with and without type hints and docstring."""
    for number, task in enumerate(TASKS):
        for draw in range(SAMPLES_PER_TASK):
            chance = Random(f"sample {number} {draw}")
            wish, _ = _asked(_usual(task, chance), chance)
            wish = replace(wish, hints=draw % 2 == 0, docstring=draw % 4 < 2)
            yield Function.of(wish.name, wish.code, wish.summary if wish.docstring else "")


def _about(task: Task, chance: Random) -> Conversation:
    wish, question = _asked(_usual(task, chance), chance)
    explained = chance.random() < 0.25
    question = " ".join([chance.choice(EXPLAINED if explained else QUESTIONS).format(wish.filled(wish.doing)), *question])
    code = fenced("python", wish.code)
    conversation = pair(content_key(question), question, f"{code}\n\n{wish.filled(wish.task.remark)}" if explained else code)
    if chance.random() < 0.22:
        conversation.messages.extend(_afterwards(wish, chance))
    return conversation


def _usual(task: Task, chance: Random) -> Wish:
    fill = {}
    if task.numbers:
        fill["n"] = str(chance.choice(task.numbers))
    if task.words:
        fill["w"] = chance.choice(task.words)
    return Wish(task, task.names.split()[0], tuple(names[0] for names, _ in task.parameters), fill, chance.choice(task.asks))


def _asked(wish: Wish, chance: Random) -> tuple[Wish, list[str]]:
    """Up to two special wishes, and the sentences that tell them."""
    told: list[str] = []
    if chance.random() < 0.35:
        wish = replace(wish, name=chance.choice(_free(wish.task.names.split(), wish)))
        told.append(chance.choice(CALLED).format(wish.name))
    if chance.random() < 0.25:
        wish = replace(wish, parameters=_other_parameters(wish, chance))
        names = listed([f"`{name}`" for name in wish.parameters])
        told.append(chance.choice(TAKING if len(wish.parameters) == 1 else TAKING_MORE).format(names))
    if len(told) < 2 and (draw := chance.random()) < 0.3:
        wish = replace(wish, hints=draw < 0.15, docstring=draw >= 0.15)
        told.append(chance.choice(HINTED if wish.hints else DOCUMENTED))
    return wish, told


def _free(names: list[str], wish: Wish) -> list[str]:
    """Those of `names` that mean nothing else in the function."""
    used = re.findall(r"(?<![$\w])[a-z_]\w*", wish.task.body)
    return [name for name in names if name not in (*used, *wish.parameters)] or names[:1]


def _other_parameters(wish: Wish, chance: Random) -> tuple[str, ...]:
    taken = (wish.name, *re.findall(r"(?<![$\w])[a-z_]\w*", wish.task.body))
    chosen: list[str] = []
    for names, _ in wish.task.parameters:
        free = [name for name in names if name not in taken and name not in chosen]
        chosen.append(chance.choice(free or names[:1]))
    return tuple(chosen)


def _afterwards(wish: Wish, chance: Random) -> Iterator[dict[str, str]]:
    """A further question about the answer, and what is said to it."""
    draw = chance.random()
    arguments, result = map(wish.filled, wish.task.case or ("", ""))
    if draw < 0.3 and wish.task.gives != "None" and (value := literal(result)):
        asked = ("How do I call it?", "How do I use it?", "Show me an example.", "Can you give an example of a call?")
        example = fenced("python", f"print({wish.name}({arguments}))")
        said = f"{example}\n\nThis prints `{value}`."
    elif draw < 0.5 and not wish.hints:
        asked, said = ("Add type hints.", "Now add type hints.", "Can you add type annotations?"), replace(wish, hints=True).code
    elif draw < 0.65 and not wish.docstring:
        asked, said = ("Add a docstring.", "Now add a docstring.", "Can you document it?"), replace(wish, docstring=True).code
    elif draw < 0.85:
        new = chance.choice([name for name in (*_free(wish.task.names.split(), wish), "compute", "my_function") if name != wish.name])
        asked = (f"Now rename it to `{new}`.", f"Rename the function to `{new}`.", f"Call the function `{new}` instead.")
        said = replace(wish, name=new).code
    else:
        old = wish.parameters[0]
        others = _free(wish.task.parameters[0][0], wish)
        new = next((name for name in others if name not in (*wish.parameters, wish.name)), "argument")
        asked = (f"Rename `{old}` to `{new}`.", f"Now rename `{old}` to `{new}`.", f"Use the name `{new}` instead of `{old}`.")
        said = replace(wish, parameters=(new, *wish.parameters[1:])).code
    yield {"role": "user", "content": chance.choice(asked)}
    yield {"role": "assistant", "content": said if said.startswith("```") else fenced("python", said)}


def imperative(doing: str) -> str:
    """"returns the sum" -> "Return the sum"."""
    verb, _, rest = doing.partition(" ")
    if verb == "is":
        return rest.removeprefix("a ").capitalize()
    base = "do" if verb == "does" else verb[:-3] + "y" if verb.endswith("ies") else verb[:-1]
    return f"{base.capitalize()} {rest}"


SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
         ast.Mod: operator.mod, ast.Pow: operator.pow}


class _Sums(ast.NodeTransformer):
    """Numbers in the place of the sums that give them."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        left, right = (ast.literal_eval(self.visit(side)) for side in (node.left, node.right))
        return ast.parse(repr(SIGNS[type(node.op)](left, right)), mode="eval").body


def literal(text: str) -> str:
    """A literal with its sums done: "[2 + 1, 'a']" -> "[3, 'a']"; "" for anything that would have to be run."""
    try:
        return str(ast.literal_eval(_Sums().visit(ast.parse(text, mode="eval"))))
    except (ValueError, SyntaxError):
        return ""
