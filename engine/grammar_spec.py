"""What form a request may want its output to have: a JSON schema, a regular expression, choices or a grammar.

Owns the limits on what may be asked; knows no tokens. What a schema or grammar means is found out by grammar_compiler.py.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from decimal import Decimal
from typing import Any, Literal, NoReturn

from .errors import InvalidGrammar

MAX_SCHEMA_BYTES = 64 * 2**10
MAX_GRAMMAR_BYTES = 16 * 2**10
"""Of one that comes from outside: the time to compile grows faster than the length."""
MAX_TRUSTED_BYTES = 256 * 2**10
MAX_REGEX_BYTES = 4 * 2**10
MAX_SCHEMA_DEPTH = 64
"""Of nested lists and objects: a schema spends two levels for each level of what it describes."""
MAX_ALTERNATIVES = 1000
"""Of a choice, and values of one enum."""
MAX_MULTIPLES = 100_000
"""Of all that numbers must be multiples of, in units of their last digits: each remainder is a state of the lexer, half a kilobyte. Of
their sum, and of their least common multiple, which is what a number has to be that must be a multiple of each."""

_HALF = re.compile("[\ud800-\udfff]")
_NO_CHOICES = "choices must be a list of non-empty strings, at least one"

Kind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]


@dataclass(frozen=True)
class GrammarSpec:
    """The form that an output must have. Raises InvalidGrammar, which is a ValueError, for what can be told from the text alone.

    Make one with `json_schema`, `json_object`, `regex`, `choice` or `grammar`.
    """

    kind: Kind
    text: str  # of the schema (JSON), the expression (Rust's regex syntax), the choices (JSON list) or the grammar (Lark or EBNF)
    strict: bool = True  # False: keywords of a JSON schema that cannot be enforced are ignored instead of refused
    trusted: bool = False  # the server's own grammar: it may ask for special tokens (<|name|>, <[id]>) and be longer
    param: str = field(default="grammar", compare=False)  # the request's field that it comes from, for errors

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise InvalidGrammar(f"the text of a {self.kind} must be a string", self.param)
        said: Any = self.text
        match self.kind:
            case "json_schema":
                self._limit("schema", MAX_SCHEMA_BYTES)
                self._check_schema(said := self._parsed())
            case "json_object":
                pass
            case "regex":
                self._limit("regular expression", MAX_REGEX_BYTES)
            case "choice":
                self._limit("list of choices", MAX_SCHEMA_BYTES)
                self._check_choices(said := self._parsed())
            case "grammar":
                self._limit("grammar", MAX_TRUSTED_BYTES if self.trusted else MAX_GRAMMAR_BYTES)
            case _:
                kinds = "json_schema, json_object, regex, choice or grammar"
                raise InvalidGrammar(f"the kind of a grammar is {kinds}, not {self.kind!r}", self.param)
        if (_HALF.search(self.text) or r"\u" in self.text) and (place := _cut(said, self.kind)):
            raise InvalidGrammar(f"{place} is not valid Unicode: it has a lone surrogate", self.param)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str, strict: bool = True, param: str = "grammar") -> GrammarSpec:
        """JSON that a schema describes. schema: parsed, or as text."""
        if isinstance(schema, str):
            return cls("json_schema", schema, strict, param=param)
        try:
            text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidGrammar(f"the schema cannot be written as JSON: {error}", param) from None
        return cls("json_schema", text, strict, param=param)

    @classmethod
    def json_object(cls, param: str = "grammar") -> GrammarSpec:
        """Any JSON object."""
        return cls("json_object", "", param=param)

    @classmethod
    def regex(cls, pattern: str, param: str = "grammar") -> GrammarSpec:
        """Text that the whole of the pattern matches."""
        return cls("regex", pattern, param=param)

    @classmethod
    def choice(cls, choices: Sequence[str], param: str = "grammar") -> GrammarSpec:
        """One of these texts."""
        if isinstance(choices, str) or not all(isinstance(choice, str) for choice in choices):
            raise InvalidGrammar(_NO_CHOICES, param)
        return cls("choice", json.dumps(list(choices), ensure_ascii=False), param=param)

    @classmethod
    def grammar(cls, text: str, param: str = "grammar", trusted: bool = False) -> GrammarSpec:
        """Text of a context-free language. text: Lark with a rule `start`, or EBNF (GBNF, with "::=") with a rule `root`."""
        return cls("grammar", text, trusted=trusted, param=param)

    def _limit(self, what: str, max_bytes: int) -> None:
        if (size := len(self.text.encode(errors="surrogatepass"))) > max_bytes:
            raise InvalidGrammar(f"the {what} has {size:,} bytes; the limit is {max_bytes:,}", self.param)
        if not self.text.strip():
            raise InvalidGrammar(f"the {what} is empty", self.param)

    def _parsed(self) -> Any:
        def refuse(name: str) -> NoReturn:
            raise ValueError(f"{name} is no JSON")

        try:
            return json.loads(self.text, parse_constant=refuse)
        except RecursionError:
            raise InvalidGrammar("the schema is nested too deeply", self.param) from None
        except ValueError as error:
            raise InvalidGrammar(f"the schema is not valid JSON: {error}", self.param) from None

    def _check_schema(self, schema: Any) -> None:
        if not isinstance(schema, (dict, bool)):
            raise InvalidGrammar("a schema must be an object, true or false", self.param)
        level, multiples, common = [schema], 0, 1
        for _ in range(MAX_SCHEMA_DEPTH):
            inner: list[Any] = []
            for value in level:
                if isinstance(value, dict):
                    enum = value.get("enum")
                    if isinstance(enum, list) and len(enum) > MAX_ALTERNATIVES:
                        raise InvalidGrammar(f"an enum has {len(enum):,} values; the limit is {MAX_ALTERNATIVES:,}", self.param)
                    multiples += (num_remainders := _remainders(value.get("multipleOf")))
                    common = math.lcm(common, num_remainders or 1)
                    inner += value.values()
                elif isinstance(value, list):
                    inner += value
            level = [value for value in inner if isinstance(value, (dict, list))]
            if max(multiples, common) > MAX_MULTIPLES:
                raise InvalidGrammar(f"multipleOf has too many digits: together at most {MAX_MULTIPLES:,} in units of the last", self.param)
            if not level:
                return
        raise InvalidGrammar(f"the schema is nested more than {MAX_SCHEMA_DEPTH} levels deep", self.param)

    def _check_choices(self, choices: Any) -> None:
        if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
            raise InvalidGrammar(_NO_CHOICES, self.param)
        if len(choices) > MAX_ALTERNATIVES:
            raise InvalidGrammar(f"there are {len(choices):,} choices; the limit is {MAX_ALTERNATIVES:,}", self.param)


def _cut(said: Any, place: str) -> str:
    """Where in it half of a character stands, if there is one."""
    if isinstance(said, str):
        return place.encode(errors="backslashreplace").decode() if _HALF.search(said) else ""
    inner = said.items() if isinstance(said, dict) else enumerate(said) if isinstance(said, list) else ()
    return next((found for key, value in inner if (found := _cut(key, there := f"{place}/{key}") or _cut(value, there))), "")


def _remainders(multiple: Any) -> int:
    """How many there are when digit after digit of a number is read. A power of ten needs none: its multiples end with zeros."""
    if isinstance(multiple, bool) or not isinstance(multiple, (int, float)):
        return 0
    number = abs(Decimal(repr(multiple))).normalize()
    return 0 if sum(number.as_tuple().digits) <= 1 else int(number.scaleb(max(0, -int(number.as_tuple().exponent))))


@dataclass
class StructuredOutputsParams:
    """The same in vLLM's words: one of the first five. Raises InvalidGrammar."""

    json: Mapping[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    backend: InitVar[str | None] = None
    disable_fallback: InitVar[bool] = False

    def __post_init__(self, backend: str | None, disable_fallback: bool) -> None:
        _ = self.spec

    @property
    def spec(self) -> GrammarSpec:
        asked = [(name, value) for name, value in vars(self).items() if value is not None and value is not False]
        match asked:
            case [("json", schema)]:
                return GrammarSpec.json_schema(schema)
            case [("regex", pattern)]:
                return GrammarSpec.regex(pattern)
            case [("choice", choices)]:
                return GrammarSpec.choice(choices)
            case [("grammar", text)]:
                return GrammarSpec.grammar(text)
            case [("json_object", _)]:
                return GrammarSpec.json_object()
            case _:
                given = " and ".join(name for name, _ in asked) or "none"
                raise InvalidGrammar(f"of a form only json, regex, choice, grammar or json_object is served, not {given}", "grammar")


GuidedDecodingParams = StructuredOutputsParams
