"""Calls with bare texts for values, of which a function's schema alone tells whether they are JSON.

Qwen3-Coder, Qwen3.5: <tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>; Seed-OSS: <seed:tool_call>...;
GLM: <tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .json_list import Hermes
from .literals import PythonLiterals, as_json, escaped
from .parser import MAX_KEY, MAX_NAME, Tool, lengths, name_of, property_rule, quoted, schema_of, several
from .scanner import MAX_HELD, Arguments, CallBegun, Content, Waiting

FUNCTION, PARAMETER = "<function=", "<parameter="
END_FUNCTION, END_PARAMETER = "</function>", "</parameter>"
ARGUMENT, END_ARGUMENT, VALUE, END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
LINE = quoted("\n")


class Qwen3Xml(PythonLiterals):
    opening, closing = Hermes.opening, Hermes.closing
    markers = (opening, closing)
    value_end: ClassVar[str] = END_PARAMETER
    key_end: ClassVar[str] = ">"
    trimmed: ClassVar[str] = "\n"
    """What a value has on both sides that is not its own."""

    def scan(self) -> Waiting[None]:
        kinds = {name_of(tool): parameter_kinds(schema_of(tool)) for tool in self.tools}
        while marker := (yield from self._until_call()):
            if marker == self.opening:
                yield from self.space()
            if name := (yield from self._function(marker)):
                self.settle(CallBegun(name), Arguments("{"))
                yield from self._parameters(kinds.get(name, {}))
                yield from self.close(END_FUNCTION)
                yield from self.close(self.closing)
            else:
                self.reject(marker)

    def _until_call(self) -> Waiting[str]:
        return (yield from self.until((self.opening, FUNCTION), Content))  # models forget the outer frame

    def _function(self, marker: str) -> Waiting[str]:
        return (yield from self._name(MAX_NAME, ">")) if marker == FUNCTION or (yield from self.skip(FUNCTION)) else ""

    def _key(self, known: Collection[str]) -> Waiting[str]:
        return (yield from self._key_itself(known)) if (yield from self.skip(PARAMETER)) else ""

    def _key_itself(self, known: Collection[str]) -> Waiting[str]:
        """Read a key and its end: one of the schema's, whatever is in it, or one that looks like a name."""
        for key in sorted(known, key=len, reverse=True):
            if key and (yield from self.skip(key + self.key_end)):
                return key
        key = yield from self._name(MAX_KEY, self.key_end[0])
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
        self._at = self._mark
        if (yield from self.more()):  # else the answer was cut, and so are the arguments
            self.settle(Arguments("}"))

    def _value(self, kinds: frozenset[str]) -> Waiting[None]:
        """Give a value out as JSON: a text, a list and an object as they come, the rest once it is whole."""
        first = yield from self.peek()
        if (first == "{" and "object" in kinds) or (first == "[" and "array" in kinds):
            self._at += 1
            self.settle(Arguments(first))
            if (yield from self.members(self.brackets[first], json_end=self.brackets[first])):
                yield from self.close(self.value_end)
            else:
                yield from self.until((self.value_end,), Arguments)  # what broke it
                self.settle()
            return
        held = "" if kinds <= {"string"} else (yield from self._held_value())
        if held is None:
            self.settle()
        elif held:
            self.settle(Arguments(as_json(held, kinds)))
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

    def _name(self, limit: int, end: str) -> Waiting[str]:
        """Read up to `end`, a character, and return what was there; "" if that is no name."""
        start = self._at - self._mark
        for _ in range(limit):
            char = yield from self.peek()
            self._at += len(char)
            if char == end:
                return self._text[self._mark + start : self._at - 1]
            if not char.isprintable() or char in "<= ":  # "" is in any text
                break
        return ""

    @classmethod
    def grammar(cls, tools: Sequence[Tool], spell: Callable[[str], str], parallel: bool) -> str:
        spelling = cls.spelling(spell)
        functions = " | ".join(f"function_{i}" for i in range(len(tools)))
        rules = [
            f"calls: {several('call', LINE, parallel)}",
            f"call: {spell(cls.opening)} ({functions}) {spell(cls.closing)}",
            spelling.text("text", "*"),
        ]
        for i, tool in enumerate(tools):
            schema = schema_of(tool)
            kinds, properties, required = parameter_kinds(schema), schema.get("properties", {}), frozenset(schema.get("required", ()))
            parameters: list[str] = []
            for j, (key, described) in enumerate(properties.items()):
                name = f"value_{i}_{j}"
                value, rule = _value_rule(described, kinds[key], name, schema)
                if not value and (length := lengths(described)) != "*":
                    rule = [spelling.text(name, length)]
                written = f"{spelling.key(key)} {f'{value} {spelling.end}' if value else name if rule else 'text'}"
                parameters.append(written if key in required else f"({written})?")
                rules.extend(rule)
            rules.append(f"function_{i}: {spelling.function(name_of(tool))} {' '.join(parameters)} {spelling.end_function}")
        return "\n".join(rules) + "\n"

    @classmethod
    def spelling(cls, spell: Callable[[str], str]) -> Spelling:
        return Spelling(
            function=lambda name: quoted(f"\n{FUNCTION}{name}>\n"),
            key=lambda key: quoted(f"{PARAMETER}{key}>\n"),
            end=quoted(f"\n{END_PARAMETER}\n"),
            end_function=quoted(f"{END_FUNCTION}\n"),
            text=lambda name, length: rf"{name}[lazy]: /(?s:.{length})\n<\/parameter>\n/",
        )


@dataclass(frozen=True)
class Spelling:
    """How grammars write a format's calls."""

    function: Callable[[str], str]
    key: Callable[[str], str]
    end: str  # of a value
    end_function: str
    text: Callable[[str, str], str]  # (name, how many characters) -> the rule of a text and its end


class SeedXml(Qwen3Xml):
    opening, closing = "<seed:tool_call>", "</seed:tool_call>"
    markers = (opening, closing)


class GlmXml(Qwen3Xml):
    """GLM 4.5 has line ends between the parts, later ones have none."""

    markers = (Hermes.opening, Hermes.closing, ARGUMENT, END_ARGUMENT, VALUE, END_VALUE)
    value_end = END_VALUE
    key_end = END_ARGUMENT
    trimmed = ""

    def _until_call(self) -> Waiting[str]:
        return (yield from self.until((self.opening,), Content))

    def _function(self, marker: str) -> Waiting[str]:
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
        end, line = spell(END_VALUE), r"/\n?/"
        lazy = "[lazy]" if end == quoted(END_VALUE) else ""
        return Spelling(
            function=lambda name: f"{quoted(name)} {line}",
            key=lambda key: f"{spell(ARGUMENT)} {quoted(key)} {spell(END_ARGUMENT)} {line} {spell(VALUE)}",
            end=f"{end} {line}",
            end_function="",
            text=lambda name, length: f"{name}: {name}_itself {line}\n{name}_itself{lazy}: /(?s:.{length})/ {end}",
        )


def _value_rule(described: Any, kinds: frozenset[str], name: str, schema: Mapping[str, Any]) -> tuple[str, list[str]]:
    """How a parameter's value is written, "" if it is any text, and the rule called `name` if it takes one."""
    choices = described.get("enum") if isinstance(described, dict) else None
    if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        return f"({' | '.join(map(quoted, choices))})", []
    if kinds <= {"string"}:
        return "", []
    return name, [f"{name}: {property_rule(described, schema)}"]


def parameter_kinds(schema: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """The JSON types that each parameter may have; none where the schema does not say, which means a text."""

    def named(value: Any, depth: int) -> set[str]:
        if not isinstance(value, dict) or depth > 4:
            return set()
        kind = value.get("type", [])
        kinds = {kind} if isinstance(kind, str) else {one for one in kind if isinstance(one, str)} if isinstance(kind, list) else set()
        for options in (value.get("anyOf"), value.get("oneOf")):
            kinds.update(*(named(option, depth + 1) for option in options) if isinstance(options, list) else ())
        match str(value.get("$ref", "")).split("/"):
            case ["#", "$defs" | "definitions" as group, name]:
                definitions = schema.get(group)
                kinds |= named(definitions.get(name) if isinstance(definitions, dict) else None, depth + 1)
            case _:
                pass
        return kinds

    return {key: frozenset(named(value, 0)) for key, value in schema.get("properties", {}).items()}
