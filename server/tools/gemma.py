"""FunctionGemma: <start_function_call>call:NAME{KEY:value,...}<end_function_call>, where texts stand between quotes that are tokens.

Gemma 4 writes the same with other tokens: <|tool_call>call:NAME{KEY:<|"|>text<|"|>}<tool_call|>.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from .literals import LiteralParser, escaped
from .parser import MAX_NAME, Tool, in_order, lengths, name_of, quoted, schema_of, several
from .scanner import Arguments, CallBegun, Content, Waiting


class FunctionGemma(LiteralParser):
    opening, closing = "<start_function_call>", "<end_function_call>"
    quote: ClassVar[str] = "<escape>"
    markers = (opening, closing, quote)

    def scan(self) -> Waiting[None]:
        while (yield from self.until((self.opening,), Content)):
            yield from self.space()
            name = (yield from self.word("{", MAX_NAME)) if (yield from self.skip("call:")) else ""
            if name and name.isprintable() and (yield from self.skip("{")):
                self.settle(CallBegun(name), Arguments("{"))
                yield from self.members("}", ":")
                yield from self.close(self.closing)
            else:
                self.reject(self.opening)

    def text(self, before: str) -> Waiting[bool]:
        if not (yield from self.skip(self.quote)):
            return False
        self.settle(Arguments(before + '"'))
        if (yield from self.until((self.quote,), escaped, space=False)):
            self.settle(Arguments('"'))
        return True

    @classmethod
    def grammar(cls, tools: Sequence[Tool], spell: Callable[[str], str], parallel: bool) -> str:
        quote = spell(cls.quote)
        lazy = "[lazy]" if quote == quoted(cls.quote) else ""
        rules: list[str] = []
        functions = [f"{quoted(name_of(tool))} {Rules(quote, schema_of(tool), rules).arguments()}" for tool in tools]
        return (
            f"calls: {several('call', '', parallel)}\n"
            f'call: {spell(cls.opening)} "call:" ({" | ".join(functions)}) {spell(cls.closing)}\n'
            f"text: {quote} rest\nrest{lazy}: /(?s:.*)/ {quote}\n"
            'any: text | number | "true" | "false" | "null" | "[" (any ("," any)*)? "]" | object\n'
            'object: "{" (member ("," member)*)? "}"\nmember: KEY ":" any\nKEY: /[^:{}\\[\\],<> \\n"]{1,64}/\n'
            'number: %json {"type": "number"}\ninteger: %json {"type": "integer"}\n' + "\n".join(rules) + "\n"
        )


class Gemma4(FunctionGemma):
    opening, closing, quote = "<|tool_call>", "<tool_call|>", '<|"|>'
    markers = (opening, closing, quote)


class Rules:
    """How values that fit a function's schema are written: an expression each, and rules, which are added to `rules`."""

    def __init__(self, quote: str, root: Mapping[str, Any], rules: list[str]) -> None:
        self._quote = quote
        self._root = root
        self._rules = rules
        self._of_place: dict[str, str] = {}

    def arguments(self) -> str:
        """Of the function: an object, whatever else its schema says."""
        return self._object(self._root) if "properties" in self._root else "object"

    def _value(self, schema: Any) -> str:
        match schema:
            case {"enum": [_, *_] as choices}:
                return f"({' | '.join(map(self._constant, choices))})"
            case {"const": value}:
                return self._constant(value)
            case {"anyOf": [_, *_] as options} | {"oneOf": [_, *_] as options}:
                return f"({' | '.join(map(self._value, options))})"
            case {"type": [_, *_] as kinds}:
                return f"({' | '.join(self._value({**schema, 'type': kind}) for kind in dict.fromkeys(map(str, kinds)))})"
            case {"$ref": str(place)} if place.startswith("#/"):
                if place not in self._of_place:
                    self._of_place[place] = name = self._add("")
                    number = int(name.removeprefix("gemma_"))
                    self._rules[number] = f"{name}: {self._value(_at(place.split('/')[1:], self._root))}"
                return self._of_place[place]
            case {"type": "object", "properties": {}}:
                return self._object(schema)
            case {"type": "array", "items": items}:
                item = self._add(self._value(items))  # by name: lists in lists would double what they hold
                return f'"[" ({item} ("," {item})*)? "]"'
            case {"type": "string"}:
                return "text" if (length := lengths(schema)) == "*" else f"{self._quote} /(?s:.{length})/ {self._quote}"
            case {"type": "boolean"}:
                return '("true" | "false")'
            case {"type": "null"}:
                return '"null"'
            case {"type": "integer" | "number" as kind}:
                return kind
            case _:
                return "any"

    def _constant(self, value: Any) -> str:
        return f"{self._quote} {quoted(value)} {self._quote}" if isinstance(value, str) else quoted(json.dumps(value))

    def _object(self, schema: Mapping[str, Any]) -> str:
        required = schema.get("required")
        required = required if isinstance(required, list) else []
        members = [(f"{quoted(f'{key}:')} {self._value(one)}", key in required) for key, one in schema["properties"].items()]
        return f'"{{" {in_order(members, quoted(","), self._add)} "}}"'

    def _add(self, expression: str) -> str:
        name = f"gemma_{len(self._rules)}"
        self._rules.append(f"{name}: {expression}")
        return name


def _at(path: Sequence[str], value: Any) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
