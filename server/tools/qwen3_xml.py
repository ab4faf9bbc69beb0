"""Calls with bare texts for values, of which a function's schema alone tells whether they are JSON.

Qwen3-Coder, Qwen3.5: <tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>; Seed-OSS: <seed:tool_call>...;
MiniMax-M2: <minimax:tool_call><invoke name="NAME"><parameter name="KEY">value</parameter></invoke></minimax:tool_call>;
GLM: <tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ...engine.json_dialects import referred
from .json_list import Hermes
from .literals import KINDS, PythonLiterals, as_json, escaped
from .parser import MAX_KEY, MAX_NAME, Tool, name_of, property_rule, quoted, schema_of, several
from .scanner import MAX_HELD, Arguments, CallBegun, Content, Waiting
from .value_rules import ValueRules, text_rules

FUNCTION, PARAMETER = "<function=", "<parameter="
END_FUNCTION, END_PARAMETER = "</function>", "</parameter>"
ARGUMENT, END_ARGUMENT, VALUE, END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
LINE = quoted("\n")


class Qwen3Xml(PythonLiterals):
    opening, closing = Hermes.opening, Hermes.closing
    other = (FUNCTION,)  # models forget the outer frame
    markers = (opening, closing)
    function: ClassVar[str] = FUNCTION
    end_function: ClassVar[str] = END_FUNCTION
    parameter: ClassVar[str] = PARAMETER
    value_end: ClassVar[str] = END_PARAMETER
    key_end: ClassVar[str] = ">"
    trimmed: ClassVar[str] = "\n"
    """What a value has on both sides that is not its own."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self._kinds = {name_of(tool): parameter_kinds(schema_of(tool)) for tool in tools}

    def scan(self) -> Waiting[None]:
        while marker := (yield from self.until((self.opening, *self.other), Content)):
            if marker == self.opening:
                yield from self.space()
            else:
                self._at -= len(marker)
            if (yield from self._framed()):
                yield from self.close(self.closing)
            else:
                self.reject(marker)

    def _framed(self) -> Waiting[bool]:
        """Read what is in a frame. False, with the text still held, if it is no call."""
        return (yield from self._call())

    def _call(self) -> Waiting[bool]:
        name = yield from self._function()
        if not name:
            return False
        self.settle(CallBegun(name), Arguments("{"))
        yield from self._parameters(self._kinds.get(name, {}))
        yield from self.close(self.end_function)
        return True

    def _function(self) -> Waiting[str]:
        name = (yield from self._name(MAX_NAME, self.key_end[0])) if (yield from self.skip(self.function)) else ""
        return name if (yield from self.skip(self.key_end[1:])) else ""

    def _key(self, known: Collection[str]) -> Waiting[str]:
        return (yield from self._key_itself(known)) if (yield from self.skip(self.parameter)) else ""

    def _key_itself(self, known: Collection[str]) -> Waiting[str]:
        """Read a key and its end: one of the schema's, whatever is in it, or one that looks like a name."""
        for key in sorted(known, key=len, reverse=True):
            if key and (yield from self.skip(key + self.key_end)):
                return key
        key = yield from self._name(MAX_KEY, self.key_end[0], barred="<")
        return key if (yield from self.skip(self.key_end[1:])) else ""

    def _parameters(self, kinds: Mapping[str, frozenset[str]]) -> Waiting[None]:
        separator = ""
        while True:
            yield from self.space()
            key = yield from self._key(kinds)
            if not key:
                break
            yield from self.skip(self.trimmed)
            self.settle(Arguments(f"{separator}{quoted(key)}: "))
            separator = ", "
            yield from self._value(kinds.get(key, frozenset()))
        self.read_again()
        if (yield from self.more()):  # else the answer was cut, and so are the arguments
            self.settle(Arguments("}"))

    def _value(self, kinds: frozenset[str]) -> Waiting[None]:
        """Give a value out as JSON: a text, a list and an object as they come, the rest once it is whole."""
        first = yield from self.peek()
        bracketed = (first == "{" and "object" in kinds) or (first == "[" and "array" in kinds)
        known = kinds <= {"string"} or (bracketed and "string" not in kinds)
        held = "" if known else (yield from self._held_value())
        if held is None:
            self.settle()
        elif held:
            self.settle(Arguments(as_json(held, kinds)))
        elif bracketed:
            self._at = self._mark + 1
            self.settle(Arguments(first))
            if (yield from self.members(self.brackets[first], json_end=self.brackets[first])):
                yield from self.close(self.value_end)
            else:
                yield from self.until((self.value_end,), Arguments)  # what broke it
                self.settle()
        else:
            self._at = self._mark
            self.settle(Arguments('"'))
            if (yield from self.until((self.trimmed + self.value_end, self.value_end), escaped, space=False)):
                self.settle(Arguments('"'))

    def _held_value(self) -> Waiting[str | None]:
        """Read a value and its end: "" if it is too long or empty, None if the answer ends first."""
        for _ in range(MAX_HELD):
            char = yield from self.peek()
            if not char:
                return None
            self._at += 1
            if char == ">" and self._text.startswith(self.value_end, max(self._mark, self._at - len(self.value_end))):
                return self._text[self._mark : self._at].removesuffix(self.value_end).removesuffix(self.trimmed)
        return ""

    def _name(self, limit: int, end: str, barred: str = "<= ") -> Waiting[str]:
        """Read up to `end`, a character, and return what was there; "" if that is no name. barred: what none has."""
        start = self._at - self._mark
        for _ in range(limit):
            char = yield from self.peek()
            self._at += len(char)
            if char == end:
                return self._text[self._mark + start : self._at - 1]
            if not char.isprintable() or char in barred:  # "" is in any text
                break
        return ""

    @classmethod
    def grammar(cls, tools: Sequence[Tool], spell: Callable[[str], str], parallel: bool) -> str:
        spelling = cls.spelling(spell)
        functions: list[str] = []
        rules: list[str] = []
        texts: dict[str, str] = {}
        for tool in tools:
            schema = schema_of(tool)
            kinds, values = parameter_kinds(schema), BareValues(schema, rules, spelling, texts)
            required = frozenset(schema.get("required", ()))
            parameters = [
                f"({spelling.key(key)} {values.parameter(described, kinds[key])}){'' if key in required else '?'}"
                for key, described in schema.get("properties", {}).items()
            ]
            functions.append(f"{spelling.function(name_of(tool))} {' '.join(parameters)} {spelling.end_function}")
        return f"{cls.frame(spell, parallel)}function: {' | '.join(functions)}\n" + "\n".join([*rules, *texts.values()]) + "\n"

    @classmethod
    def frame(cls, spell: Callable[[str], str], parallel: bool) -> str:
        """The rules of calls, each of which holds a `function`."""
        return f"calls: {several('call', LINE, parallel)}\ncall: {spell(cls.opening)} function {spell(cls.closing)}\n"

    @classmethod
    def spelling(cls, spell: Callable[[str], str]) -> Spelling:
        return Spelling(
            function=lambda name: quoted(f"\n{cls.function}{name}{cls.key_end}\n"),
            key=lambda key: quoted(f"{cls.parameter}{key}{cls.key_end}{cls.trimmed}"),
            end=quoted(f"{cls.trimmed}{cls.value_end}\n"),
            end_function=quoted(f"{cls.end_function}\n"),
            marker=cls.value_end,
        )


@dataclass(frozen=True)
class Spelling:
    """How grammars write a format's calls."""

    function: Callable[[str], str]
    key: Callable[[str], str]
    end: str  # of a value
    end_function: str
    marker: str  # what ends a text


class BareValues(ValueRules):
    """Values with their ends: texts as they are, all others in JSON. texts: the rules of texts, by name."""

    def __init__(self, root: Mapping[str, Any], rules: list[str], spelling: Spelling, texts: dict[str, str]) -> None:
        super().__init__(root, rules)
        self._spelling = spelling
        self._texts = texts

    def parameter(self, described: Any, kinds: frozenset[str]) -> str:
        """kinds: the types that it may have."""
        return self._json(described) if kinds and "string" not in kinds else self.value(described)

    def text(self, length: str) -> str:
        name = "text_" + re.sub(r"\W+", "_", length)
        if name not in self._texts:
            self._texts[name] = text_rules(name, length, self._spelling.marker, self._spelling.end)
        return name

    def constant(self, value: Any) -> str:
        return f"{quoted(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))} {self._spelling.end}"

    def typed(self, schema: Mapping[str, Any], kind: str) -> str:
        return self._json(schema)

    def anything(self) -> str:
        return self.text("*")

    def _json(self, schema: Any) -> str:
        return f"{self.add(property_rule(schema, self.root, self._rules))} {self._spelling.end}"


class SeedXml(Qwen3Xml):
    opening, closing = "<seed:tool_call>", "</seed:tool_call>"
    markers = (opening, closing)


class MiniMaxM2(Qwen3Xml):
    """All calls in one frame, and names in quotes."""

    opening, closing = "<minimax:tool_call>", "</minimax:tool_call>"
    function, end_function, parameter = '<invoke name="', "</invoke>", '<parameter name="'
    other = (function,)
    markers = (opening, closing)
    key_end = '">'
    trimmed = ""

    def _framed(self) -> Waiting[bool]:
        return (yield from self.listed(self._call))

    @classmethod
    def frame(cls, spell: Callable[[str], str], parallel: bool) -> str:
        return f"calls: {spell(cls.opening)} {LINE} {several('function', '', parallel)} {spell(cls.closing)}\n"

    @classmethod
    def spelling(cls, spell: Callable[[str], str]) -> Spelling:
        return replace(super().spelling(spell), function=lambda name: quoted(f"{cls.function}{name}{cls.key_end}\n"))


class GlmXml(Qwen3Xml):
    """GLM 4.5 has line ends between the parts, later ones have none."""

    other = ()
    markers = (Hermes.opening, Hermes.closing, ARGUMENT, END_ARGUMENT, VALUE, END_VALUE)
    value_end = END_VALUE
    key_end = END_ARGUMENT
    trimmed = ""

    def _function(self) -> Waiting[str]:
        start = self._at - self._mark
        while (char := (yield from self.peek())) and char not in "<\n" and self._at - self._mark < start + MAX_NAME:
            self._at += 1
        name = self._text[self._mark + start : self._at].strip()
        yield from self.space()
        begins = name in map(name_of, self.tools) or (yield from self.skip(ARGUMENT)) or (yield from self.skip(self.closing))
        self._at = self._mark + start + len(name)
        return name if begins and name.isprintable() and " " not in name else ""

    def _key(self, known: Collection[str]) -> Waiting[str]:
        key = (yield from self._key_itself(known)) if (yield from self.skip(ARGUMENT)) else ""
        yield from self.space()
        return key if key and (yield from self.skip(VALUE)) else ""

    @classmethod
    def spelling(cls, spell: Callable[[str], str]) -> Spelling:
        line = r"/\n?/"
        return Spelling(
            function=lambda name: f"{quoted(name)} {line}",
            key=lambda key: f"{spell(ARGUMENT)} {quoted(key)} {spell(END_ARGUMENT)} {line} {spell(VALUE)}",
            end=f"{spell(END_VALUE)} {line}",
            end_function="",
            marker=END_VALUE,
        )


def parameter_kinds(schema: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """The JSON types that each parameter may have; none where the schema does not say, which means a text."""

    def named(value: Any, depth: int) -> set[str]:
        if not isinstance(value, dict) or depth > 4:
            return set()
        kind = value.get("type", [])
        kinds = {kind} if isinstance(kind, str) else {one for one in kind if isinstance(one, str)} if isinstance(kind, list) else set()
        for options in (value.get("anyOf"), value.get("oneOf"), value.get("allOf")):
            kinds.update(*(named(option, depth + 1) for option in options) if isinstance(options, list) else ())
        if not kinds:
            choices = value.get("enum", [value["const"]] if "const" in value else [])
            kinds.update(KINDS[type(choice)] for choice in (choices if isinstance(choices, list) else ()))
        if isinstance(ref := value.get("$ref"), str):
            kinds |= named(referred(ref, schema), depth + 1)
        return kinds | {"null"} if kinds and value.get("nullable") is True else kinds

    return {key: frozenset(named(value, 0)) for key, value in schema.get("properties", {}).items()}
