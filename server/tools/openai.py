"""gpt-oss (OpenAI's Harmony format): a message to functions.NAME on a channel of its own, whose text is the arguments."""

import re
from collections.abc import Callable, Sequence

from .parser import MAX_NAME, Tool, ToolParser, argument_rules, name_of, quoted
from .scanner import Arguments, CallBegun, Content, Waiting

START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL = (f"<|{word}|>" for word in ("start", "channel", "constrain", "message", "end", "call"))
MAX_HEADER = 2 * MAX_NAME
"""Characters before a message's text that say whose it is, what kind it is, and to whom it goes."""

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def recipient(header: str) -> str:
    """The function that a message with this header calls; "" if it is for the reader."""
    found = _RECIPIENT.search(header)
    return found[1].removeprefix("functions.") if found else ""


class OpenAI(ToolParser):
    """One call in a reply: it ends with a token that ends the reply as well."""

    markers = (START, CHANNEL, CONSTRAIN, MESSAGE, CALL)

    def scan(self) -> Waiting[None]:
        while marker := (yield from self.until((START, CHANNEL), Content)):
            name = recipient(self._text[self._mark : self._at]) if (yield from self.held_until(MESSAGE, MAX_HEADER)) else ""
            if not name:
                self.reject(marker)
                continue
            yield from self.space()
            self.settle(CallBegun(name))
            if (yield from self.skip(CALL)) or (yield from self.skip(END)) or not ((yield from self.more()) or self._cut):
                self.settle(Arguments("{}"))
            else:
                yield from self.arguments()
                yield from self.close(CALL)
                yield from self.close(END)  # where a model goes on behind its call

    @classmethod
    def grammar(cls, tools: Sequence[Tool], spell: Callable[[str], str], parallel: bool) -> str:
        frame = f'{spell(CONSTRAIN)} "json" {spell(MESSAGE)}'
        calls = [f"{quoted(name_of(tool) + ' ')} {frame} arguments_{i}" for i, tool in enumerate(tools)]
        return f'calls: {spell(CHANNEL)} "commentary to=functions." ({" | ".join(calls)})\n' + argument_rules(tools)
