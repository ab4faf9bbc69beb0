"""Calls as JSON objects behind a marker, in a list or one behind the other: Hermes and Qwen, Granite, Phi-4-mini, Nemotron, Hunyuan."""

import json
from collections.abc import Callable, Sequence
from typing import ClassVar

from .parser import Tool, ToolParser, object_rules, several
from .scanner import Content, Waiting

LINE = '"\\n"'
SEPARATOR = '", "'


class JsonList(ToolParser):
    """<opening>[{"name": ..., "arguments": {...}}, ...]<closing>, anywhere in the text."""

    closing: ClassVar[str] = ""
    form: ClassVar[str] = '{"name": %s, "arguments": %s}'

    def scan(self) -> Waiting[None]:
        while marker := (yield from self.until((self.opening, *self.other), Content)):
            yield from self.space()
            if (yield from self.listed()):
                yield from self.close(self.closing)
            else:
                self.reject(marker)

    @classmethod
    def grammar(cls, tools: Sequence[Tool], spell: Callable[[str], str], parallel: bool) -> str:
        closing = spell(cls.closing) if cls.closing else ""
        rules = f'calls: {spell(cls.opening)} "[" {several("call", SEPARATOR, parallel)} "]" {closing}\n'
        return rules + object_rules(tools, "arguments")

    @classmethod
    def written(cls, calls: Sequence[tuple[str, str]]) -> str:
        objects = ", ".join(cls.form % (json.dumps(name), arguments or "{}") for name, arguments in calls)
        return f"{cls.opening}[{objects}]{cls.closing}"


class Hermes(JsonList):
    """Each call in a frame of its own; models forget that at times."""

    opening, closing = "<tool_call>", "</tool_call>"
    markers = (opening, closing)

    @classmethod
    def grammar(cls, tools: Sequence[Tool], spell: Callable[[str], str], parallel: bool) -> str:
        rules = f"calls: {several('framed', LINE, parallel)}\nframed: {spell(cls.opening)} {LINE} call {LINE} {spell(cls.closing)}\n"
        return rules + object_rules(tools, "arguments")

    @classmethod
    def written(cls, calls: Sequence[tuple[str, str]]) -> str:
        return "\n".join(f"{cls.opening}\n{cls.form % (json.dumps(name), arguments or '{}')}\n{cls.closing}" for name, arguments in calls)


class Granite(JsonList):
    """Granite 3: the marker is a token, or the same word spelled out."""

    opening, other = "<|tool_call|>", ("<tool_call>",)
    markers = (opening,)


class Hunyuan(JsonList):
    opening, closing = "<tool_calls>", "</tool_calls>"
    markers = (opening, closing)


class Nemotron(JsonList):
    opening, closing = "<TOOLCALL>", "</TOOLCALL>"
    markers = (opening, closing)


class Phi4Mini(JsonList):
    """In its own list each object is a call in the shape of OpenAI's API; by the template of vLLM's examples functools is the marker."""

    opening, closing, other = "<|tool_call|>", "<|/tool_call|>", ("functools",)
    form = '{"type": "function", "function": {"name": %s, "arguments": %s}}'
    markers = (opening, closing)

    @classmethod
    def grammar(cls, tools: Sequence[Tool], spell: Callable[[str], str], parallel: bool) -> str:
        rules = f'calls: {spell(cls.opening)} "[" {several("typed", SEPARATOR, parallel)} "]" {spell(cls.closing)}\n'
        return rules + """typed: "{\\"type\\": \\"function\\", \\"function\\": " call "}"\n""" + object_rules(tools, "arguments")
