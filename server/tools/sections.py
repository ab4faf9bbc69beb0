"""Calls in a section of their own, each with its arguments in JSON between tokens that stand for nothing else: DeepSeek V3 and Kimi K2."""

import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from .parser import MAX_NAME, Tool, ToolParser, argument_rules, name_of, quoted, several
from .scanner import CallBegun, Content, Waiting

FENCE = "```"
_KIMIS_ID = re.compile(r"functions\.(?P<name>.+):[0-9]+")


class Section(ToolParser):
    """<opening><begin>...<separator>...{...}<end>...<closing>"""

    closing: ClassVar[str]
    begin: ClassVar[str]
    separator: ClassVar[str]
    end: ClassVar[str]

    def scan(self) -> Waiting[None]:
        while marker := (yield from self.until((self.opening, *self.other), Content)):
            if marker == self.begin:  # models forget the outer frame
                self._at -= len(marker)
            if (yield from self.listed(self._call)):
                yield from self.close(self.closing)
            else:
                self.reject(marker)

    def _call(self) -> Waiting[bool]:
        if not (yield from self.skip(self.begin)):
            return False
        begun = yield from self._begun()
        yield from self.space()
        if not begun.name or (yield from self.peek()) != "{":
            return False
        self.settle(begun)
        yield from self.arguments()
        yield from self._end_call()
        return True

    def _word(self, end: str) -> Waiting[str]:
        """Read up to `end` and it, too; "" if what is before it is no name."""
        start = self._at - self._mark
        found = yield from self.held_until(end, MAX_NAME)
        word = self._text[self._mark + start : self._at].removesuffix(end).strip()
        return word if found and word.isprintable() and "<" not in word else ""

    @abstractmethod
    def _begun(self) -> Waiting[CallBegun]:
        """Read what stands before the arguments. The name is "" if that is no call."""

    def _end_call(self) -> Waiting[None]:
        yield from self.close(self.end)


class DeepSeekV31(Section):
    """NAME, separator, {...}. V3 writes function, separator, NAME, and the arguments in a fence. Either parser reads both."""

    opening, closing = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    begin, separator, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    other = (begin,)
    markers = (opening, begin, separator, end, closing)

    def _begun(self) -> Waiting[CallBegun]:
        name = yield from self._word(self.separator)
        yield from self.space()
        if name == "function" and (yield from self.peek()) != "{":
            name = yield from self._word("\n")
            yield from self.space()
            if (yield from self.skip(FENCE)):
                yield from self.skip("json")
        return CallBegun(name)

    def _end_call(self) -> Waiting[None]:
        yield from self.close(FENCE)
        yield from self.close(self.end)

    @classmethod
    def grammar(cls, tools: Sequence[Tool], spell: Callable[[str], str], parallel: bool) -> str:
        calls = [f"{quoted(name_of(tool))} {spell(cls.separator)} arguments_{i}" for i, tool in enumerate(tools)]
        return _section(cls, calls, "", spell, parallel) + argument_rules(tools)


class DeepSeekV3(DeepSeekV31):
    @classmethod
    def grammar(cls, tools: Sequence[Tool], spell: Callable[[str], str], parallel: bool) -> str:
        kind, before, behind = f'"function" {spell(cls.separator)}', f"\n{FENCE}json\n", quoted(f"\n{FENCE}")
        calls = [f"{kind} {quoted(name_of(tool) + before)} arguments_{i} {behind}" for i, tool in enumerate(tools)]
        return _section(cls, calls, quoted("\n"), spell, parallel) + argument_rules(tools)


class KimiK2(Section):
    """functions.NAME:INDEX, separator, {...}. The whole of the first is the call's id, by which the template tells results apart."""

    opening, closing = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    begin, separator, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    other = (begin,)
    markers = (opening, begin, separator, end, closing)

    def _begun(self) -> Waiting[CallBegun]:
        head = yield from self._word(self.separator)
        known = _KIMIS_ID.fullmatch(head)
        return CallBegun(head.removeprefix("functions.")) if known is None else CallBegun(known["name"], head)

    @classmethod
    def grammar(cls, tools: Sequence[Tool], spell: Callable[[str], str], parallel: bool) -> str:
        calls = [f"{quoted(f'functions.{name_of(tool)}:')} INDEX {spell(cls.separator)} arguments_{i}" for i, tool in enumerate(tools)]
        return _section(cls, calls, "", spell, parallel) + "INDEX: /[0-9]{1,4}/\n" + argument_rules(tools)


def _section(format: type[Section], calls: Sequence[str], between: str, spell: Callable[[str], str], parallel: bool) -> str:
    """The rules of a section of one of these calls, or of some with something between."""
    return (
        f"calls: {spell(format.opening)} {several('call', between, parallel)} {spell(format.closing)}\n"
        f"call: {spell(format.begin)} ({' | '.join(calls)}) {spell(format.end)}\n"
    )
