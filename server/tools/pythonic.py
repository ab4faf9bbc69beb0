"""Pythonic calls: the answer is [NAME(KEY=value, ...), ...], as of ToolACE, Llama 3.2 and 4; LFM2 and OLMo 3 have them in a frame."""

from collections.abc import Callable, Sequence

from .json_list import LINE, SEPARATOR
from .literals import PythonLiterals
from .parser import MAX_KEY, MAX_NAME, Tool, in_order, json_rule, name_of, property_rule, quoted, schema_of, several
from .scanner import Arguments, CallBegun, Content, Waiting

START, END = "<|python_start|>", "<|python_end|>"
ENDS = "\"'=,()"
"""Of a key; one that has them stands in quotes."""


class Pythonic(PythonLiterals):
    """Llama 4 may write tokens around the list.

    Nothing need mark a call, so only a function on offer makes one, at the beginning: a list or a link stays an answer.
    """

    markers = (START, END)

    def scan(self) -> Waiting[None]:
        yield from self._list()
        while (yield from self.until((START,), Content)):
            if not (yield from self._list()):
                self.reject(START)

    def _list(self) -> Waiting[bool]:
        yield from self.space()
        if (yield from self.peek()) == "[" and (yield from self.listed(self._call)):
            yield from self.close(END)
            return True
        self._at = self._mark
        return False

    def _call(self) -> Waiting[bool]:
        """Read a call and give it out. It is one once a first key is there, or an end."""
        start = self._at - self._mark
        while (char := (yield from self.peek())) and (char.isalnum() or char in "_.:/-") and self._at - self._mark < start + MAX_NAME:
            self._at += 1
        name = self._text[self._mark + start : self._at]
        if not name or not (self.opening or name in map(name_of, self.tools)) or not (yield from self.skip("(")):
            return False
        inside = self._at - self._mark
        yield from self.space()
        if (yield from self.peek()) != ")":
            yield from self.string(MAX_KEY) if (yield from self.peek()) == '"' else self.word(ENDS, MAX_KEY)
            if (yield from self.peek()) not in ("=", ""):
                return False
        self._at = self._mark + inside
        self.settle(CallBegun(name), Arguments("{"))
        yield from self.members(")", "=")
        return True

    @classmethod
    def grammar(cls, tools: Sequence[Tool], spell: Callable[[str], str], parallel: bool) -> str:
        return f'calls: "[" {several("call", SEPARATOR, parallel)} "]"\n' + _call_rules(tools)


class Lfm2(Pythonic):
    """<|tool_call_start|>[NAME(KEY=value, ...), ...]<|tool_call_end|>, before or behind what is said."""

    opening, closing = "<|tool_call_start|>", "<|tool_call_end|>"
    markers = (opening, closing)

    def scan(self) -> Waiting[None]:
        while (yield from self.until((self.opening,), Content)):
            if (yield from self.listed(self._call)):
                yield from self.close(self.closing)
            else:
                self.reject(self.opening)

    @classmethod
    def grammar(cls, tools: Sequence[Tool], spell: Callable[[str], str], parallel: bool) -> str:
        calls = several("call", SEPARATOR, parallel)
        return f'calls: {spell(cls.opening)} "[" {calls} "]" {spell(cls.closing)}\n' + _call_rules(tools)


class Olmo3(Lfm2):
    """<function_calls>NAME(KEY=value, ...)</function_calls>, a line for each call."""

    opening, closing = "<function_calls>", "</function_calls>"
    markers = (opening, closing)

    @classmethod
    def grammar(cls, tools: Sequence[Tool], spell: Callable[[str], str], parallel: bool) -> str:
        calls = several("call", LINE, parallel)
        return f"calls: {spell(cls.opening)} {LINE}? {calls} {LINE}? {spell(cls.closing)}\n" + _call_rules(tools)


def _call_rules(tools: Sequence[Tool]) -> str:
    """`call`: one of the tools with values in JSON, which are Python's in all but true, false and null."""
    rules: list[str] = []

    def add(expression: str) -> str:
        rules.append(f"pythonic_{len(rules)}: {expression}")
        return f"pythonic_{len(rules) - 1}"

    def arguments(tool: Tool) -> str:
        schema = schema_of(tool)
        if "properties" not in schema:
            return '(other ("," " " other)*)?'
        required = schema.get("required", ())
        members = [
            (f"{quoted(f'{spelled(key)}=')} {add(property_rule(one, schema, rules))}", key in required)
            for key, one in schema["properties"].items()
        ]
        return in_order(members, SEPARATOR, add)

    def spelled(key: str) -> str:
        return quoted(key) if not key or key != key.strip() or not set(ENDS).isdisjoint(key) else key

    calls = " | ".join(f'{quoted(f"{name_of(tool)}(")} {arguments(tool)} ")"' for tool in tools)
    return f"call: {calls}\nother: /[A-Za-z_][A-Za-z0-9_]{{0,{MAX_KEY - 1}}}/ \"=\" any\nany: {json_rule({})}\n" + "\n".join(rules) + "\n"
