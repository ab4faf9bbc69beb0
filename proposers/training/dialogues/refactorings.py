"""Changes of code that its user asks for: names, types, docstrings, comments, values, parameters. Each says what was asked.

A change and its reverse are made from the same good function: what is taken away in the question stands in the answer.
"""

import ast
import keyword
import re
import tokenize
from dataclasses import dataclass
from random import Random

from .python_source import all_tokens, compiles, function_in, replaced, tokens_of, with_lines, with_token, without_comments

ADJECTIVES = (
    "new", "old", "first", "last", "next", "current", "total", "max", "min", "user", "main", "temp", "input", "output", "best", "left",
    "right", "raw", "final", "local", "base", "other", "inner", "outer", "start", "end", "sorted", "file", "list", "data", "my", "line",
)
NOUNS = (
    "value", "result", "item", "items", "data", "total", "number", "numbers", "values", "text", "index", "size", "count", "name", "names",
    "entry", "entries", "amount", "element", "node", "buffer", "counter", "limit", "position", "answer", "word", "words", "key", "path",
    "length", "string", "char", "score", "point", "row", "column", "step", "rate", "price", "weight", "table", "group", "record", "token",
)
VERBS = ("compute", "get", "find", "make", "build", "calculate", "run", "check", "read", "create", "process", "handle", "convert", "apply")


@dataclass(frozen=True)
class Edit:
    """What is asked, the code before and after, and a remark for those who want to know why."""

    ask: str
    before: str
    after: str
    remark: str = ""


def rename(source: str, chance: Random) -> Edit | None:
    """A variable, a parameter or the function itself, everywhere it stands; now and then two of them."""
    function, used = function_in(source), _words(source)
    variables = [name for name in _own_names(function) if _renamable(name, source, function)]
    named = _renamable(function.name, source, function)
    if named and (not variables or chance.random() < 0.3):
        new = _fresh(VERBS, NOUNS, used, chance)
        return _renamed(source, {function.name: new}, "function", chance)
    if not variables:
        return None
    chosen = chance.sample(variables, k=2 if len(variables) > 1 and chance.random() < 0.15 else 1)
    new_names: dict[str, str] = {}
    for old in chosen:
        new_names[old] = _fresh(("", *ADJECTIVES), NOUNS, [*used, *new_names.values()], chance)
    arguments = {argument.arg for argument in _arguments(function)}
    return _renamed(source, new_names, "parameter" if chosen[0] in arguments else "variable", chance)


def _renamed(source: str, new: dict[str, str], kind: str, chance: Random) -> Edit:
    after = replaced(source, lambda token: new.get(token.string) if token.type == tokenize.NAME else None)
    what = " and ".join(f"`{old}` to `{name}`" for old, name in new.items())
    (old, name), *more = new.items()
    asks = [f"Rename {what}.", f"Rename {what} in this code.", f"Please rename {what}.", f"Can you rename {what}?", f"rename {what}"]
    if not more:
        asks += [
            f"Rename the {kind} `{old}` to `{name}`.", f"Rename {old} to {name}, please.", f"Change the name `{old}` to `{name}`.",
            f"Use the name `{name}` instead of `{old}`.", f"The {kind} `{old}` should be called `{name}`.",
            f"Call the {kind} {old} {name} instead.",
        ]
    return Edit(chance.choice(asks), source, after)


def _renamable(name: str, source: str, function: ast.FunctionDef) -> bool:
    """Not where it is also an attribute or a keyword of a call, or stands in a text, which may or may not mean it."""
    nodes = list(ast.walk(function))
    if name in {"self", "cls", "_"} or any(isinstance(node, ast.Attribute) and node.attr == name for node in nodes):
        return False
    if any(isinstance(node, ast.keyword) and node.arg == name for node in nodes) or any(
            isinstance(node, ast.Global | ast.Nonlocal | ast.Import | ast.ImportFrom | ast.ExceptHandler | ast.ClassDef) for node in nodes):
        return False
    texts = [token.string for token in all_tokens(source) if token.type in (tokenize.STRING, tokenize.COMMENT)]
    return not any(re.search(rf"\b{name}\b", text) for text in texts)


def _own_names(function: ast.FunctionDef) -> list[str]:
    stored = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return sorted(stored | {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)})


def _arguments(function: ast.FunctionDef) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def _words(source: str) -> list[str]:
    return re.findall(r"\w+", source)


def _fresh(firsts: tuple[str, ...], seconds: tuple[str, ...], used: list[str], chance: Random) -> str:
    while True:
        name = "_".join(part for part in (chance.choice(firsts), chance.choice(seconds)) if part)
        if name not in used and not keyword.iskeyword(name):
            return name


def type_hints(source: str, chance: Random) -> Edit | None:
    """Add them, or now and then remove them."""
    bare = without_hints(source)
    if bare is None:
        return None
    if chance.random() < 0.7:
        asks = (
            "Add type hints to this function.", "Add type annotations.", "Annotate this function with types.", "Add types to this code.",
            "Can you add type hints?", "Please add type hints.", "Type hints are missing here. Add them.",
        )
        return Edit(chance.choice(asks), bare, source)
    asks = (
        "Remove the type hints.", "Remove all type annotations from this function.", "Take out the type hints.",
        "Delete the type hints, please.")
    return Edit(chance.choice(asks), source, bare)


def without_hints(source: str) -> str | None:
    """None if there are none, or if one spans lines."""
    function = function_in(source)
    hints = [(arg, arg.annotation) for arg in _arguments(function) if arg.annotation]
    if function.returns is None or not hints or any(arg.lineno != hint.end_lineno for arg, hint in hints):
        return None
    lines = source.splitlines()
    for arg, hint in sorted(hints, key=lambda pair: (pair[0].lineno, pair[0].col_offset), reverse=True):
        row, start, end = arg.lineno - 1, arg.col_offset + len(arg.arg), hint.end_col_offset or 0
        lines[row] = lines[row][:start] + lines[row][end:]
    bare = re.sub(r"\) *->[^\n]*:(?=\n)", "):", "\n".join(lines), count=1)
    return bare if compiles(bare) and function_in(bare).returns is None else None


def docstring(source: str, chance: Random) -> Edit | None:
    """Add it, with or without being told its words, or remove it."""
    function = function_in(source)
    text, first = ast.get_docstring(function), function.body[0]
    if not text or "\n" in text or len(function.body) < 2 or first.end_lineno is None:
        return None
    bare = with_lines(source, first.lineno, first.end_lineno, [])
    draw = chance.random()
    if draw < 0.35:
        asks = (
            f'Add the docstring "{text}"', f'Add this docstring: "{text}"', f'The docstring should be "{text}"',
            f'Use "{text}" as docstring.')
        return Edit(chance.choice(asks), bare, source)
    if draw < 0.7:
        asks = ("Add a docstring.", "Add a short docstring to this function.", "Document this function.", "Write a docstring for this.")
        return Edit(chance.choice(asks), bare, source)
    asks = ("Remove the docstring.", "Remove the docstring from this function.", "Delete the docstring, please.", "Drop the docstring.")
    return Edit(chance.choice(asks), source, bare)


def comments(source: str, chance: Random) -> Edit | None:
    """Remove them all."""
    asks = (
        "Remove the comments.", "Remove all comments from this code.", "Delete the comments.", "Please take out the comments.",
        "Give me this without comments.")
    return Edit(chance.choice(asks), source, without_comments(source))


def prints(source: str, chance: Random) -> Edit | None:
    """Remove what is only printed, where something else is left to do."""
    gone: list[int] = []
    for block in _blocks(function_in(source)):
        printed = [statement for statement in block if _is_print(statement)]
        if len(printed) < len(block):
            gone += [line for statement in printed for line in range(statement.lineno, (statement.end_lineno or 0) + 1)]
    after = "\n".join(line for number, line in enumerate(source.splitlines(), 1) if number not in gone)
    asks = ("Remove the print statements.", "Remove all calls of print.", "Delete the prints, please.", "Take out the print calls.")
    return Edit(chance.choice(asks), source, after) if compiles(after) and not re.search(r"\bprint\(", after) else None


def _blocks(function: ast.FunctionDef) -> list[list[ast.stmt]]:
    found: list[list[ast.stmt]] = []
    for node in ast.walk(function):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                found.append(value)
    return found


def _is_print(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(ast.Call(ast.Name("print"))):
            return True
        case _:
            return False


def value(source: str, chance: Random) -> Edit | None:
    """Another default, number or text, where it stands but once."""
    defaults = [
        (argument.arg, default) for argument, default in _defaults(function_in(source)) if isinstance(default, ast.Constant)]
    if defaults and chance.random() < 0.6:
        name, default = chance.choice(defaults)
        new = repr(_other(default.value, chance)).replace("'", '"')
        lines = source.splitlines()
        row = default.lineno - 1
        line = lines[row][:default.col_offset] + new + lines[row][default.end_col_offset or 0:]
        asks = (
            f"Change the default value of `{name}` to {new}.", f"Make {new} the default of `{name}`.", 
            f"The default of `{name}` should be {new}.", f"Set the default of {name} to {new}.")
        return Edit(chance.choice(asks), source, with_lines(source, default.lineno, default.lineno, [line]))
    tokens = tokens_of(source)
    numbers = [t for t in tokens if t.type == tokenize.NUMBER and t.string.isdigit() and sum(o.string == t.string for o in tokens) == 1]
    texts = [t for t in tokens if t.type == tokenize.STRING and re.fullmatch(r"""(["'])[^"'\\{}]{1,40}\1""", t.string)]
    if not numbers and not texts:
        return None
    token = chance.choice(numbers or texts) if chance.random() < 0.5 else chance.choice(texts or numbers)
    new = str(_other(int(token.string), chance)) if token.type == tokenize.NUMBER else (
        token.string[0] + str(_other(token.string[1:-1], chance)) + token.string[-1])
    asks = (
        f"Change {token.string} to {new}.", f"Replace {token.string} by {new}.", f"Use {new} instead of {token.string}.",
        f"Instead of {token.string} it should be {new}.", f"Please change {token.string} to {new}.")
    return Edit(chance.choice(asks), source, with_token(source, token, new))


def _defaults(function: ast.FunctionDef) -> list[tuple[ast.arg, ast.expr]]:
    arguments = [*function.args.posonlyargs, *function.args.args]
    return list(zip(arguments[len(arguments) - len(function.args.defaults):], function.args.defaults, strict=True))


def _other(old: object, chance: Random) -> object:
    match old:
        case bool():
            return not old
        case int() | float():
            return chance.choice([number for number in (0, 1, 2, 3, 5, 8, 10, 16, 20, 25, 50, 64, 100, 200, 500, 1000) if number != old])
        case str():
            return chance.choice([word for word in (old.upper(), old.title(), f"{old}!", *NOUNS) if word != old])
        case _:
            return chance.choice((0, 1, 10, True, False, ""))


def parameter(source: str, chance: Random) -> Edit | None:
    """One more, with a default, at the end of those that stand in one line."""
    function = function_in(source)
    head = re.fullmatch(r"(def \w+\(.*)(\)(?: -> [^:]+)?:)", source.splitlines()[function.lineno - 1])
    if head is None or function.args.kwarg or function.args.kwonlyargs or function.args.vararg:
        return None
    name, default = _fresh(("", *ADJECTIVES), NOUNS, _words(source), chance), chance.choice(("None", "0", "1", "10", "True", "False", '""'))
    line = f"{head[1]}{'' if head[1].endswith('(') else ', '}{name}={default}{head[2]}"
    asks = (
        f"Add a parameter `{name}` with the default {default}.", f"Add the parameter `{name}={default}`.",
        f"It needs a parameter {name} that is {default} by default.",
        f"Give the function another parameter `{name}` with default value {default}.",
    )
    return Edit(chance.choice(asks), source, with_lines(source, function.lineno, function.lineno, [line]))


def statement(source: str, chance: Random) -> Edit | None:
    """A line or two more: a print before the last return, or a check at the start."""
    function = function_in(source)
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if not body:
        return None
    last, first, space = body[-1], body[0], " " * body[0].col_offset
    names = [argument.arg for argument in _arguments(function)]
    if isinstance(last, ast.Return) and isinstance(last.value, ast.Name) and chance.random() < 0.6:
        name = last.value.id
        asks = (f"Print `{name}` before it is returned.", f"Add a print of `{name}` before the return.", f"Print {name} before the return.")
        return Edit(chance.choice(asks), source, with_lines(source, last.lineno, last.lineno - 1, [f"{space}print({name})"]))
    if not names or names[0] == "self":
        return None
    name = chance.choice(names)
    line, told = chance.choice((
        (f"if {name} is None:", f"`{name}` is None"), (f"if not {name}:", f"`{name}` is empty")))
    what = chance.choice(("return None", "return", f'raise ValueError("{name} is missing")'))
    asks = (f"{what[0].upper()}{what[1:]} if {told}.", f"If {told}, {what}.", f"Add a check at the start: {what} if {told}.")
    return Edit(chance.choice(asks), source, with_lines(source, first.lineno, first.lineno - 1, [f"{space}{line}", f"{space}    {what}"]))


def quotes(source: str, chance: Random) -> Edit | None:
    """Double instead of single, or the other way round."""
    old, new = chance.choice((("'", '"'), ('"', "'")))
    plain = re.compile(rf"[rbuf]?{old}[^\\'\"{{}}]*{old}")

    def turned(token: tokenize.TokenInfo) -> str | None:
        return token.string.replace(old, new) if token.type == tokenize.STRING and plain.fullmatch(token.string) else None

    kind = "double" if new == '"' else "single"
    asks = (f"Use {kind} quotes.", f"Change the strings to {kind} quotes.", f"Use {kind} quotes for the strings, please.")
    return Edit(chance.choice(asks), source, replaced(source, turned))
