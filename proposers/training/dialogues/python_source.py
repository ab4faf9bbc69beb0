"""Python functions of other people's programs: short, whole, at the top of their file, with a docstring of one sentence.

Text is changed by the places of its tokens and nodes, so that the formatting stays. Knows no dialogue.
"""

from __future__ import annotations

import ast
import builtins
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ..corpus import Record, content_key

MOST_CHARS, MOST_LINES = 900, 26


@dataclass(frozen=True)
class Function:
    """One function as text; `key` is that of its words, so that the same function is on the same side of the split wherever it stands."""

    name: str
    source: str
    summary: str                     # the docstring's first sentence; "" without one
    key: int
    imports: Mapping[str, str] = field(default_factory=dict[str, str])       # its file's statements, by the name they bind

    @staticmethod
    def of(name: str, source: str, summary: str, imports: Mapping[str, str] | None = None) -> Function:
        return Function(name, source, summary, content_key(re.sub(r"\s+", " ", source)), imports or {})

    @property
    def program(self) -> str | None:
        """The function below the imports that it needs; None if it needs more of its file than that."""
        if any(name not in self.imports for name in self.foreign):
            return None
        needed = sorted({self.imports[name] for name in self.foreign})
        return "\n".join([*needed, *([""] * 2 if needed else []), self.source])

    @property
    def foreign(self) -> list[str]:
        """Names that are neither the function's own nor built in, sorted: what else the reader would have to know."""
        nodes = list(ast.walk(ast.parse(self.source)))
        bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
        bound |= {node.arg for node in nodes if isinstance(node, ast.arg)} | set(dir(builtins))
        bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler) and node.name}
        bound |= {(alias.asname or alias.name).split(".")[0] for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)
                  for alias in node.names}
        return sorted({node.id for node in nodes if isinstance(node, ast.Name)} - bound)

    @property
    def head(self) -> str:
        """Everything up to and with the docstring; the `def` alone without one."""
        quotes = [match.end() for match in re.finditer('"""', self.source)]
        return self.source[:quotes[1]] if self.summary else self.source.partition(":\n")[0] + ":"

    @property
    def signature(self) -> str:
        """Name, parameters and types, as a person would quote them."""
        return self.source.partition(":\n")[0].removeprefix("def ")


def functions_of(records: Iterable[Record]) -> Iterator[Function]:
    """The functions worth showing, each once."""
    seen: set[int] = set()
    for record in records:
        try:
            tree = ast.parse(record.text)
        except (SyntaxError, ValueError, RecursionError):
            continue
        lines, imports = record.text.splitlines(), _imports(tree)
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef) or node.decorator_list or node.name.startswith(("_", "test")):
                continue
            function = _shortened(node, lines, imports)
            if function is not None and function.key not in seen:
                seen.add(function.key)
                yield function


def _imports(tree: ast.Module) -> dict[str, str]:
    """What a file imports at its top from the standard library."""
    found: dict[str, str] = {}
    for node in tree.body:
        match node:
            case ast.Import(names) if all(alias.name.split(".")[0] in sys.stdlib_module_names for alias in names):
                found |= {(alias.asname or alias.name).split(".")[0]: ast.unparse(ast.Import([alias])) for alias in names}
            case ast.ImportFrom(str(module), names, 0) if module.split(".")[0] in sys.stdlib_module_names:
                found |= {alias.asname or alias.name: ast.unparse(ast.ImportFrom(module, [alias], 0)) for alias in names}
            case _:
                pass
    return found


def _shortened(node: ast.FunctionDef, lines: list[str], imports: Mapping[str, str]) -> Function | None:
    """The function with a docstring of one sentence; None if it is too long or does not compile so."""
    source = lines[node.lineno - 1:node.end_lineno]
    first, summary = node.body[0], summary_of(ast.get_docstring(node) or "")
    if ast.get_docstring(node) is not None:
        assert first.end_lineno is not None
        sentence = [f'{" " * first.col_offset}"""{summary}"""'] if summary else []
        source[first.lineno - node.lineno:first.end_lineno - node.lineno + 1] = sentence
    text = "\n".join(line.rstrip() for line in source)
    if all(isinstance(part, ast.Pass | ast.Expr) for part in node.body):      # a stub
        return None
    if not 3 <= len(source) <= MOST_LINES or len(text) > MOST_CHARS or "\t" in text or not text.isascii() or not compiles(text):
        return None
    return Function.of(node.name, text, summary, imports)


def summary_of(docstring: str) -> str:
    """The first sentence, if it is short and plain enough to stand on one line."""
    paragraph = re.split(r"\n\s*\n|>>>", docstring.strip())[0]
    sentence = re.split(r"(?<=\.) ", " ".join(paragraph.split()))[0]
    plain = sentence.isascii() and not re.search(r'["\\]|^\W|[:@]param|:r?type', sentence)
    return sentence if plain and " " in sentence and 8 <= len(sentence) < 110 else ""


def compiles(source: str) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return True


@lru_cache(maxsize=8)                # several edits in a row look at the same function
def all_tokens(source: str) -> tuple[tokenize.TokenInfo, ...]:
    return tuple(tokenize.generate_tokens(io.StringIO(source).readline))


def tokens_of(source: str) -> list[tokenize.TokenInfo]:
    """Tokens that lie within one line."""
    return [token for token in all_tokens(source) if token.start[0] == token.end[0]]


def replaced(source: str, new: Callable[[tokenize.TokenInfo], str | None]) -> str:
    """`source` with other text for the tokens that `new` has one for; everything between them stays."""
    for token in reversed(tokens_of(source)):
        text = new(token)
        if text is not None:
            source = with_token(source, token, text)
    return source


def without_comments(source: str) -> str:
    """Lines that hold only a comment are gone, others end before theirs."""
    comments = {token.start[0]: token for token in tokens_of(source) if token.type == tokenize.COMMENT}
    lines: list[str] = []
    for number, line in enumerate(source.splitlines(), 1):
        if number not in comments:
            lines.append(line)
        elif code := line[:comments[number].start[1]].rstrip():
            lines.append(code)
    return "\n".join(lines)


def with_token(source: str, token: tokenize.TokenInfo, text: str) -> str:
    """`source` with `text` in place of one of its tokens, which lies within one line."""
    lines = source.splitlines()
    row = token.start[0] - 1
    lines[row] = lines[row][:token.start[1]] + text + lines[row][token.end[1]:]
    return "\n".join(lines)


def with_lines(source: str, first: int, last: int, new: Sequence[str]) -> str:
    """`source` with other lines from line `first` up to and with `last`, which count from 1; last = first - 1 only inserts."""
    lines = source.splitlines()
    return "\n".join([*lines[:first - 1], *new, *lines[last:]])


@lru_cache(maxsize=8)
def function_in(source: str) -> ast.FunctionDef:
    """The function that the text begins with, past what it imports."""
    return next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
