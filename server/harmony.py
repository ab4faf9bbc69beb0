"""A reply in messages, as OpenAI's Harmony format has it: analysis is reasoning, the others are for the reader or call functions."""

from collections.abc import Callable

from .tools.openai import CALL, CHANNEL, END, MAX_HEADER, MESSAGE, START, recipient
from .tools.scanner import Content, Piece, Reasoning, Scanner, Waiting


class HarmonyParser(Scanner):
    """Gives out the texts of messages. One that calls a function comes out whole, as content, for the parser of calls."""

    def __init__(self, inside: bool) -> None:
        """inside: whether the reply goes on with reasoning that the prompt begins."""
        super().__init__()
        self._begun: Callable[[str], Piece] = Reasoning if inside else Content

    def scan(self) -> Waiting[None]:
        piece, told = self._begun, set[Callable[[str], Piece]]()
        while True:
            header = yield from self._header()
            calls = bool(header and recipient(header))
            if calls:
                piece = Content
            elif header is None:
                self._at = self._mark  # it goes on without one
            else:
                piece = Reasoning if "analysis" in header else Content
                self.settle(*([piece("\n")] if piece in told else []))
            told.add(piece)
            if not (yield from self.until((END, CALL), piece, space=False)):
                return
            if calls:
                self.give(Content)
            else:
                self.settle()
            piece = Content

    def _header(self) -> Waiting[str | None]:
        """Read what stands before a message's text, which stays held; None if nothing does. Nothing comes of one that breaks off."""
        yield from self.space()
        start = self._at - self._mark
        if not ((yield from self.skip(START)) or (yield from self.skip(CHANNEL))):
            return None
        if not (yield from self.held_until(MESSAGE, MAX_HEADER)):
            if not (yield from self.more()):
                self.settle()
            return None
        return self._text[self._mark + start : self._at]
