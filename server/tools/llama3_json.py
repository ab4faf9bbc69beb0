"""Llama 3: the answer is {"name": ..., "parameters": {...}}, several with semicolons between; <|python_tag|> may come before.

Nothing else marks a call, so only a function on offer makes an object one: an answer in JSON stays an answer.
"""

from collections.abc import Callable, Sequence

from .parser import Tool, ToolParser, object_rules, several
from .scanner import Content, Waiting

TAG = "<|python_tag|>"
SEPARATOR = '"; "'


class Llama3Json(ToolParser):
    markers = (TAG,)

    def scan(self) -> Waiting[None]:
        yield from self._calls()
        while (yield from self.until((TAG,), Content)):
            if not (yield from self._calls()):
                self.reject(TAG)

    def _calls(self) -> Waiting[bool]:
        """Read calls; whether there was one. What follows them, or all if there was none, is left for others to read."""
        found = False
        while True:
            yield from self.space()
            if found:
                self.settle()
                if (yield from self.skip(";")):
                    yield from self.space()
            if not (yield from self.object_call(("parameters", "arguments"), only_on_offer=True)):
                if found:
                    self.read_again()
                self._at = self._mark
                return found
            found = True

    @classmethod
    def grammar(cls, tools: Sequence[Tool], spell: Callable[[str], str], parallel: bool) -> str:
        return f"calls: {several('call', SEPARATOR, parallel)}\n" + object_rules(tools, "parameters")
