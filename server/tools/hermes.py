"""Hermes, Qwen and the embedded model: <tool_call>{"name": ..., "arguments": {...}}</tool_call> anywhere in the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .parser import Tool, ToolParser, object_rules, several
from .scanner import Content, Waiting

BEGIN, END = "<tool_call>", "</tool_call>"
LINE = '"\\n"'


class Hermes(ToolParser):
    markers = (BEGIN, END)
    opening = BEGIN

    def scan(self) -> Waiting[None]:
        while (yield from self.until((BEGIN,), Content)):
            yield from self.space()
            if (yield from self.object_call()):
                yield from self.close(END)
            else:
                self.reject(BEGIN)

    @staticmethod
    def grammar(tools: Sequence[Tool], spell: Callable[[str], str], parallel: bool) -> str:
        rules = f"calls: {several('framed', LINE, parallel)}\nframed: {spell(BEGIN)} {LINE} call {LINE} {spell(END)}\n"
        return rules + object_rules(tools, "arguments")
