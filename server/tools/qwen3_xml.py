"""Qwen3-Coder, Qwen3.5: <tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>; values are bare texts.

What a value is, a text or JSON, is told by the function's schema alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .hermes import BEGIN, END
from .parser import MAX_KEY, MAX_NAME, Tool, ToolParser, json_rule, name_of, quoted, schema_of, several
from .scanner import MAX_HELD, Arguments, CallBegun, Content, Piece, Waiting

FUNCTION, PARAMETER = "<function=", "<parameter="
END_FUNCTION, END_PARAMETER = "</function>", "</parameter>"
VALUE_ENDS = ("\n" + END_PARAMETER, END_PARAMETER)
LINE = quoted("\n")


class Qwen3Xml(ToolParser):
    markers = (BEGIN, END)
    opening = BEGIN

    def scan(self) -> Waiting[None]:
        kinds = {name_of(tool): parameter_kinds(schema_of(tool)) for tool in self.tools}
        while marker := (yield from self.until((BEGIN, FUNCTION), Content)):  # models forget the outer frame
            if marker == BEGIN:
                yield from self.space()
            name = (yield from self._name(MAX_NAME)) if marker == FUNCTION or (yield from self.skip(FUNCTION)) else ""
            if name:
                self.settle(CallBegun(name), Arguments("{"))
                yield from self._parameters(kinds.get(name, {}))
                yield from self.close(END_FUNCTION)
                yield from self.close(END)
            else:
                self.reject(marker)

    def _parameters(self, kinds: Mapping[str, frozenset[str]]) -> Waiting[None]:
        separator = ""
        while True:
            yield from self.space()
            key = (yield from self._name(MAX_KEY)) if (yield from self.skip(PARAMETER)) else ""
            if not key:
                break
            yield from self.skip("\n")
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
            yield from self.value(piece=Arguments)
            yield from self.close(END_PARAMETER)
            return
        held = "" if kinds <= {"string"} else (yield from self._held_value())
        if held is None:
            self.settle()
        elif held:
            self.settle(Arguments(as_json(held, kinds)))
        else:
            self._at = self._mark
            self.settle(Arguments('"'))
            if (yield from self.until(VALUE_ENDS, escaped, space=False)):
                self.settle(Arguments('"'))

    def _held_value(self) -> Waiting[str | None]:
        """Read a value and its end: "" if it is too long or empty, None if the answer ends first."""
        for _ in range(MAX_HELD):
            char = yield from self.peek()
            if not char:
                return None
            self._at += 1
            if char == ">" and self._text.startswith(END_PARAMETER, max(self._mark, self._at - len(END_PARAMETER))):
                return self._text[self._mark : self._at].removesuffix(END_PARAMETER).removesuffix("\n")
        return ""

    def _name(self, limit: int) -> Waiting[str]:
        """Read up to ">" and return what was there; "" if that is no name."""
        start = self._at - self._mark
        for _ in range(limit):
            char = yield from self.peek()
            self._at += len(char)
            if char == ">":
                return self._text[self._mark + start : self._at - 1]
            if not char.isprintable() or char in "<= ":  # "" is in any text
                break
        return ""

    @staticmethod
    def grammar(tools: Sequence[Tool], spell: Callable[[str], str], parallel: bool) -> str:
        functions = " | ".join(f"function_{i}" for i in range(len(tools)))
        rules = [
            f"calls: {several('call', LINE, parallel)}",
            f"call: {spell(BEGIN)} {LINE} ({functions}) {quoted(END_FUNCTION + chr(10))} {spell(END)}",
            r"text[lazy]: /(?s:.*)\n<\/parameter>\n/",
        ]
        for i, tool in enumerate(tools):
            schema = schema_of(tool)
            kinds, properties, required = parameter_kinds(schema), schema.get("properties", {}), frozenset(schema.get("required", ()))
            definitions = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
            parameters: list[str] = []
            for j, (key, described) in enumerate(properties.items()):
                written, rule = _written(key, described, kinds[key], f"value_{i}_{j}", definitions)
                parameters.append(written if key in required else f"({written})?")
                rules.extend(rule)
            rules.append(f"function_{i}: {quoted(FUNCTION + name_of(tool) + '>' + chr(10))} {' '.join(parameters)}")
        return "\n".join(rules) + "\n"


def _written(key: str, described: Any, kinds: frozenset[str], value: str, definitions: Mapping[str, Any]) -> tuple[str, list[str]]:
    """How a parameter is written, and the rule called `value` if it takes one: that of a value that is no text."""
    begin, end = quoted(f"{PARAMETER}{key}>\n"), quoted(f"\n{END_PARAMETER}\n")
    choices = described.get("enum") if isinstance(described, dict) else None
    if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        return f"{begin} ({' | '.join(map(quoted, choices))}) {end}", []
    if kinds <= {"string"}:
        return f"{begin} text", []
    schema = {**described, **definitions} if isinstance(described, dict) else described
    return f"{begin} {value} {end}", [f"{value}: {json_rule(schema)}"]


def escaped(text: str) -> Piece:
    """A part of a text as a part of a JSON string."""
    return Arguments(json.dumps(text, ensure_ascii=False)[1:-1])


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


def as_json(raw: str, kinds: frozenset[str]) -> str:
    """A bare value as JSON of one of these types; as a text if it is of none of them. Python's True, False and None are understood."""
    spelled = {"True": "true", "False": "false", "None": "null"}.get(raw.strip(), raw.strip())
    try:
        kind = _KINDS[type(json.loads(spelled, parse_constant=_no_json))]
    except (ValueError, RecursionError):
        kind = "string"
    fits = kind in kinds or (kind == "integer" and "number" in kinds)
    return spelled if fits and kind != "string" else json.dumps(raw, ensure_ascii=False)


def _no_json(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


_KINDS: dict[type, str] = {
    dict: "object", list: "array", str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null",
}  # fmt: skip
