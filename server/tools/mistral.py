"""Mistral: [TOOL_CALLS] before a list of JSON objects, or, in newer models, before each call as name[ARGS]{...}."""

from collections.abc import Callable, Sequence

from .json_list import SEPARATOR
from .parser import MAX_NAME, Tool, ToolParser, alphanumeric_id, argument_rules, name_of, object_rules, quoted, several
from .scanner import SPACE, CallBegun, Content, Waiting

BEGIN, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class Mistral(ToolParser):
    """The newer form: a name, perhaps an id, and the arguments."""

    markers = (BEGIN, ID, ARGUMENTS)
    opening = BEGIN
    new_id = staticmethod(alphanumeric_id)

    def scan(self) -> Waiting[None]:
        while (yield from self.until((BEGIN,), Content)):
            yield from self.space()
            if not ((yield from self.listed()) if (yield from self.peek()) == "[" else (yield from self._named())):
                self.reject(BEGIN)

    def _named(self) -> Waiting[bool]:
        name = yield from self._word()
        if not name:
            return False
        if (yield from self.skip(ID)):
            yield from self._word()  # the caller gets an id of ours
        yield from self.skip(ARGUMENTS)
        yield from self.space()
        if (yield from self.peek()) != "{":
            return False
        self.settle(CallBegun(name))
        yield from self.arguments()
        yield from self.space()
        self.settle()
        return True

    def _word(self) -> Waiting[str]:
        """Read up to a bracket or white space."""
        start = self._at - self._mark
        for _ in range(MAX_NAME):
            char = yield from self.peek()
            if not char or char in "[{" or char in SPACE or not char.isprintable():
                break
            self._at += 1
        return self._text[self._mark + start : self._at]

    @classmethod
    def grammar(cls, tools: Sequence[Tool], spell: Callable[[str], str], parallel: bool) -> str:
        calls = [f"{quoted(name_of(tool))} {spell(ARGUMENTS)} arguments_{i}" for i, tool in enumerate(tools)]
        rules = f"calls: {several('call', '', parallel)}\ncall: {spell(BEGIN)} ({' | '.join(calls)})\n"
        return rules + argument_rules(tools)


class MistralList(Mistral):
    """The older form. Either parser reads both; a model is made to write its own."""

    @classmethod
    def grammar(cls, tools: Sequence[Tool], spell: Callable[[str], str], parallel: bool) -> str:
        rules = f'calls: {spell(BEGIN)} "[" {several("call", SEPARATOR, parallel)} "]"\n'
        return rules + object_rules(tools, "arguments")
