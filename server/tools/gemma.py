"""FunctionGemma: <start_function_call>call:NAME{KEY:value,...}<end_function_call>, where texts stand between quotes that are tokens.

Gemma 4 writes the same with other tokens: <|tool_call>call:NAME{KEY:<|"|>text<|"|>}<tool_call|>.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from .literals import LiteralParser, escaped
from .parser import MAX_NAME, Tool, in_order, json_rule, name_of, quoted, schema_of, several
from .scanner import Arguments, CallBegun, Content, Waiting
from .value_rules import ValueRules, text_rules

COMMA = ' "," '


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
        rules: list[str] = []
        functions = [f"{quoted(name_of(tool))} {_Values(schema_of(tool), rules, quote, cls.quote).arguments()}" for tool in tools]
        return (
            f"calls: {several('call', '', parallel)}\n"
            f'call: {spell(cls.opening)} "call:" ({" | ".join(functions)}) {spell(cls.closing)}\n'
            f"text: {quote} rest\n{text_rules('rest', '*', cls.quote, quote)}"
            'any: text | number | "true" | "false" | "null" | "[" (any ("," any)*)? "]" | object\n'
            'object: "{" (member ("," member)*)? "}"\nmember: KEY ":" any\nKEY: /[^:{}\\[\\],<> \\n"]{1,64}/\n'
            'number: %json {"type": "number"}\n' + "\n".join(rules) + "\n"
        )


class Gemma4(FunctionGemma):
    opening, closing, quote = "<|tool_call>", "<tool_call|>", '<|"|>'
    markers = (opening, closing, quote)


class _Values(ValueRules):
    """quote: how the grammar writes what stands around texts; marker: what that is."""

    def __init__(self, root: Mapping[str, Any], rules: list[str], quote: str, marker: str) -> None:
        super().__init__(root, rules)
        self._quote = quote
        self._marker = marker

    def arguments(self) -> str:
        """Of the function: an object, whatever else its schema says."""
        return self._object(self.root)

    def text(self, length: str) -> str:
        if length == "*":
            return "text"
        self._rules.append(text_rules(name := f"rest_{len(self._rules)}", length, self._marker, self._quote))
        return f"{self._quote} {name}"

    def constant(self, value: Any) -> str:
        match value:
            case str():
                return f"{self._quote} {quoted(value)} {self._quote}"
            case list():
                return f'"[" {COMMA.join(map(self.constant, value))} "]"'
            case dict():
                return f'"{{" {COMMA.join(f"{self._key(key)} {self.constant(one)}" for key, one in value.items())} "}}"'
            case _:
                return quoted(json.dumps(value))

    def typed(self, schema: Mapping[str, Any], kind: str) -> str:
        match kind:
            case "object":
                return self._object(schema)
            case "array":
                item = self.add(self.value(schema.get("items")))  # by name: lists in lists would double what they hold
                least, most = (size if type(size := schema.get(key)) is int else None for key in ("minItems", "maxItems"))
                if most == 0:
                    return '"[" "]"'
                more = "" if most == 1 else f'("," {item}){{{max((least or 0) - 1, 0)},{"" if most is None else most - 1}}}'
                return f'"[" ({item} {more}){"" if least else "?"} "]"'
            case "boolean":
                return '("true" | "false")'
            case "null":
                return '"null"'
            case "integer" | "number":
                return self.add(json_rule(schema))
            case _:
                return "any"

    def anything(self) -> str:
        return "any"

    def _object(self, schema: Mapping[str, Any]) -> str:
        described, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        if not isinstance(described, dict) or not described:
            if others is False or "properties" in schema:
                return '"{" "}"'
            member = self.add(f'KEY ":" {self.value(others)}')
            return f'"{{" ({member} ("," {member})*)? "}}"'
        required = schema.get("required")
        required = required if isinstance(required, list) else []
        members = [(f"{self._key(key)} {self.value(one)}", key in required) for key, one in described.items()]
        return f'"{{" {in_order(members, quoted(","), self.add)} "}}"'

    def _key(self, key: str) -> str:
        """A key and its colon; in quotes where it would not be read as it is."""
        plain = key.strip() == key and key and not frozenset(key) & frozenset(":,{}[]")
        return quoted(f"{key}:") if plain else f'{self.constant(key)} ":"'
