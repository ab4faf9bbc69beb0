"""FunctionGemma: <start_function_call>call:NAME{KEY:value,...}<end_function_call>, where texts stand between quotes that are tokens.

Gemma 4 writes the same with other tokens: <|tool_call>call:NAME{KEY:<|"|>text<|"|>}<tool_call|>.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from .parser import MAX_NAME, Tool, ToolParser, lengths, name_of, quoted, schema_of, several
from .qwen3_xml import as_json, escaped
from .scanner import MAX_HELD, SPACE, Arguments, CallBegun, Content, Waiting

_BARE = frozenset(("integer", "number", "boolean", "null"))


class FunctionGemma(ToolParser):
    opening, closing = "<start_function_call>", "<end_function_call>"
    quote: ClassVar[str] = "<escape>"
    markers = (opening, closing, quote)

    def scan(self) -> Waiting[None]:
        while (yield from self.until((self.opening,), Content)):
            yield from self.space()
            name = (yield from self._word("{", MAX_NAME)) if (yield from self.skip("call:")) else ""
            if name and name.isprintable() and (yield from self.skip("{")):
                self.settle(CallBegun(name), Arguments("{"))
                yield from self._members()
                yield from self.close(self.closing)
            else:
                self.reject(self.opening)

    def _members(self) -> Waiting[None]:
        """Give the arguments out as JSON, from behind their first bracket on."""
        open_brackets, comma, is_key = ["}"], "", True
        while open_brackets and (char := (yield from self.peek())):
            if char in SPACE or char in ",:" or char == open_brackets[-1]:
                self._at += 1
                if char == open_brackets[-1]:
                    open_brackets.pop()
                    self.settle(Arguments(char))
                    comma = ""
                else:
                    self.settle(*([Arguments(": ")] if char == ":" else []))
                    comma, is_key = (", ", open_brackets[-1] == "}") if char == "," else (comma, is_key and char != ":")
                continue
            if char in "{[" and not is_key:
                open_brackets.append("}" if char == "{" else "]")
                self._at += 1
                self.settle(Arguments(comma + char))
                comma, is_key = "", char == "{"
                continue
            if (yield from self.skip(self.quote)):
                self.settle(Arguments(comma + '"'))
                if not (yield from self.until((self.quote,), escaped, space=False)):
                    return
                self.settle(Arguments('"'))
            else:
                word = yield from self._word(":" if is_key else ",]}", MAX_HELD)
                if not word or not (yield from self.more()):  # nothing that can be read, or cut
                    break
                self.settle(Arguments(comma + (quoted(word) if is_key else as_json(word, _BARE))))
            comma = ""
        if open_brackets and (yield from self.more()):
            self._at = self._mark  # what broke it is text
        else:
            self.settle()

    def _word(self, ends: str, limit: int) -> Waiting[str]:
        start = self._at - self._mark
        while (char := (yield from self.peek())) and char not in ends and self._at - self._mark < start + limit:
            self._at += 1
        return self._text[self._mark + start : self._at].strip()

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
        """With a comma before each member but the first that is there."""
        required, ways, others = schema.get("required"), list[str](), '""'
        required = required if isinstance(required, list) else []
        for key, one in reversed(schema["properties"].items()):
            member = self._add(f"{quoted(f'{key}:')} {self._value(one)}")
            ways = [f"{member} {others}", *([] if key in required else ways)]
            others = self._add(f'"," {member} {others}' if key in required else f'("," {member})? {others}')
        some = f"({' | '.join(ways)})" if ways else ""
        return f'"{{" {some}{"?" if some and not any(key in required for key in schema["properties"]) else ""} "}}"'

    def _add(self, expression: str) -> str:
        name = f"gemma_{len(self._rules)}"
        self._rules.append(f"{name}: {expression}")
        return name


def _at(path: Sequence[str], value: Any) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
