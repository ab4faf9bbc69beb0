"""Mistakes put into good functions, to be found and mended: one line is wrong, and the edit's answer is the function as it was."""

import ast
import keyword
import re
import tokenize
from collections.abc import Callable
from random import Random

from .python_source import compiles, function_in, tokens_of, with_lines, with_token
from .refactorings import Edit

FIX = (
    "Fix the bug in this function.", "There is a bug in this code. Fix it.", "This function is wrong. Correct it.", "Fix this code.",
    "Find and fix the mistake.", "Can you fix this?", "Fix the error in this code.", "This does not work. Please fix it.",
    "Debug this function.", "There is a mistake in here. Correct it.",
)
EXPLAIN = (
    "Why does this not work? Fix it.", "What is wrong with this code?", "Fix the bug and tell me what was wrong.",
    "Find the bug in this function and explain it.", "What is the mistake here?", "Why is this wrong? Correct it.",
)
SYNTAX = (
    "I get a SyntaxError. Fix it.", "Python says SyntaxError. Can you fix this?", "Fix the syntax error.", 
    "This has a syntax error. Correct it.", "Why do I get a SyntaxError here?",
)
SWAPS = (
    ("<", ">"), (">", "<"), ("<=", "<"), (">=", ">"), ("==", "!="), ("!=", "=="), ("+", "-"), ("-", "+"), ("*", "+"), ("/", "*"),
    ("//", "/"), ("and", "or"), ("or", "and"), ("in", "not in"), ("+=", "-="), ("-=", "+="), ("True", "False"), ("False", "True"),
)
NUMBERS = (("0", "1"), ("1", "0"), ("2", "1"), ("1", "2"))

Slip = tuple[str, str, tuple[str, ...]]          # the broken function, what was wrong, how such a mistake may be told


def fix(source: str, chance: Random) -> Edit | None:
    """One slip: a wrong sign, number, name or return, or something that Python itself refuses."""
    makers = list(MAKERS)
    chance.shuffle(makers)
    for make in makers:
        slip = make(source, chance)
        if slip is not None and slip[0] != source:
            broken, remark, told = slip
            draw = chance.random()
            if draw < 0.3:
                return Edit(chance.choice(EXPLAIN), broken, source, remark)
            ask = chance.choice(told if told and draw < 0.65 else FIX)
            return Edit(ask, broken, source, remark if ask.startswith("Why") else "")
    return None


def wrong_sign(source: str, chance: Random) -> Slip | None:
    return _swapped(source, SWAPS, chance)


def off_by_one(source: str, chance: Random) -> Slip | None:
    return _swapped(source, NUMBERS, chance)


def _swapped(source: str, swaps: tuple[tuple[str, str], ...], chance: Random) -> Slip | None:
    start = function_in(source).body[0].lineno
    slips = [(token, wrong) for token in tokens_of(source) for right, wrong in swaps if token.string == right and token.start[0] >= start]
    if not slips:
        return None
    token, wrong = chance.choice(slips)
    broken = with_token(source, token, wrong)
    if not compiles(broken):                      # as `for i not in items`
        return None
    return broken, _must_be(source, broken, token.start[0]), ()


def wrong_name(source: str, chance: Random) -> Slip | None:
    """A variable of the function in place of another."""
    function = function_in(source)
    names = sorted({node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
                   | {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)})
    reads = [node for node in ast.walk(function.body[-1]) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    reads = [node for node in reads if node.id in names]
    if not reads or len(names) < 2:
        return None
    read = chance.choice(reads)
    wrong = chance.choice([name for name in names if name != read.id])
    broken = next((with_token(source, token, wrong) for token in tokens_of(source)
                   if token.start == (read.lineno, read.col_offset) and token.string == read.id), None)
    return None if broken is None else (broken, _must_be(source, broken, read.lineno), ())


def misspelled(source: str, chance: Random) -> Slip | None:
    """A name with two letters swapped or one left out: Python knows no such name."""
    function = function_in(source)
    stored = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    stored |= {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    tokens = [token for token in tokens_of(source) if token.start[0] >= function.body[0].lineno and len(token.string) > 3
              and (token.string in stored or token.string in ("return", "while", "print", "range"))]
    if not tokens:
        return None
    token = chance.choice(tokens)
    place = chance.randrange(1, len(token.string) - 1)
    right, swapped = token.string, token.string[:place] + token.string[place + 1] + token.string[place] + token.string[place + 2:]
    wrong = swapped if swapped != right else right[:place] + right[place + 1:]
    if re.search(rf"\b{wrong}\b", source) or keyword.iskeyword(wrong):
        return None
    told = SYNTAX if keyword.iskeyword(right) else (
        f"NameError: name '{wrong}' is not defined. Fix it.", f"I get this error: name '{wrong}' is not defined.",
        f"Why do I get \"NameError: name '{wrong}' is not defined\"?")
    return with_token(source, token, wrong), f"`{wrong}` must be `{right}`.", told


def no_colon(source: str, chance: Random) -> Slip | None:
    lines = source.splitlines()
    ends = {token.start[0] for token in tokens_of(source) if token.string == ":" and token.end[1] == len(lines[token.start[0] - 1])}
    rows = [row for row in sorted(ends) if not compiles(with_lines(source, row, row, [lines[row - 1][:-1]]))]
    if not rows:
        return None
    row = chance.choice(rows)
    line = lines[row - 1][:-1]
    told = (*SYNTAX, "SyntaxError: expected ':'. Fix it.")
    return with_lines(source, row, row, [line]), f"A colon was missing after `{line.strip()}`.", told


def no_parenthesis(source: str, chance: Random) -> Slip | None:
    tokens = [token for token in tokens_of(source) if token.string in (")", "]")]
    if not tokens:
        return None
    token = chance.choice(tokens)
    kind = "parenthesis" if token.string == ")" else "bracket"
    remark = f"A closing {kind} was missing in `{source.splitlines()[token.start[0] - 1].strip()}`."
    return with_token(source, token, ""), remark, (*SYNTAX, f"A {kind} is missing. Fix it.")


def no_quote(source: str, chance: Random) -> Slip | None:
    tokens = [token for token in tokens_of(source) if token.type == tokenize.STRING and not token.string.endswith(('"""', "'''"))]
    if not tokens:
        return None
    token = chance.choice(tokens)
    line = source.splitlines()[token.start[0] - 1].strip()
    return with_token(source, token, token.string[:-1]), f"A quote was missing in `{line}`.", (*SYNTAX, "A quote is missing. Fix it.")


def no_return(source: str, chance: Random) -> Slip | None:
    rows = [number for number, line in enumerate(source.splitlines(), 1) if re.match(r" +return \S.*[^([{,]$", line)]
    if not rows:
        return None
    row = chance.choice(rows)
    broken = with_lines(source, row, row, [source.splitlines()[row - 1].replace("return ", "", 1)])
    told = ("It always returns None. Fix it.", "Why does it return None?")
    return (broken, "The `return` was missing.", told) if compiles(broken) else None


def assigned(source: str, chance: Random) -> Slip | None:
    """`if a = b:`"""
    tokens = [token for token in tokens_of(source) if token.string == "==" and token.line.strip().startswith(("if ", "elif ", "while "))]
    if not tokens:
        return None
    token = chance.choice(tokens)
    broken = with_token(source, token, "=")
    return broken, _must_be(source, broken, token.start[0]), SYNTAX


def not_indented(source: str, chance: Random) -> Slip | None:
    """The first line of a block stands where its head does."""
    body = [node.body[0] for node in ast.walk(function_in(source)) if isinstance(node, ast.For | ast.While | ast.If | ast.With)]
    first = [statement for statement in body if statement.lineno == statement.end_lineno and statement.col_offset >= 8]
    if not first:
        return None
    statement = chance.choice(first)
    line = source.splitlines()[statement.lineno - 1]
    if line[:statement.col_offset].strip():       # on one line with its head
        return None
    broken = with_lines(source, statement.lineno, statement.lineno, [line[4:]])
    told = ("IndentationError: expected an indented block. Fix it.", "I get an IndentationError. Fix it.", "Fix the indentation.")
    return None if compiles(broken) else (broken, f"`{line.strip()}` was not indented.", told)


def _must_be(source: str, broken: str, row: int) -> str:
    right, wrong = (text.splitlines()[row - 1].strip() for text in (source, broken))
    return f"It must be `{right}`, not `{wrong}`."


MAKERS: tuple[Callable[[str, Random], Slip | None], ...] = (
    wrong_sign, wrong_sign, off_by_one, wrong_name, misspelled, no_colon, no_parenthesis, no_quote, no_return, assigned, not_indented,
)
