"""Which piece of a streamed text is which token: servers cut streams by steps, not by tokens, and hold some text back."""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

Token = tuple[str, str | None]
"""Its text, and who guessed it; None = the target."""


@dataclass(frozen=True)
class Piece:
    """Text of one token, ready to be shown."""

    text: str
    proposer: str | None
    is_reasoning: bool = False


class TokenPlacer:
    """Finds the tokens of one answer in its text, in order. Some have none there: end markers, what a stop string cut off."""

    def __init__(self) -> None:
        self.counts: Counter[str | None] = Counter()
        self._text = ""  # come and not yet shown
        self._reasoning = 0  # characters of it that are reasoning, at its start
        self._tokens: deque[Token] = deque()
        self._latest: str | None = None  # who said the token before

    def add(self, text: str, tokens: Iterable[Token], reasoning: str = "") -> list[Piece]:
        """What can be shown now. reasoning: comes before `text`."""
        self._text += reasoning + text
        self._reasoning += len(reasoning)
        for token in tokens:
            self._tokens.append(token)
            self.counts[token[1]] += 1
        return self._place(is_last=False)

    def finish(self) -> list[Piece]:
        """The rest: no more tokens will come."""
        return self._place(is_last=True)

    def _place(self, is_last: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while self._tokens:
            full, proposer = self._tokens[0]
            spelled = next((form for form in (full, full.lstrip()) if form and self._text.startswith(form)), "")
            if not spelled and not is_last and len(self._text) < len(full) and full.startswith(self._text):
                return pieces  # the rest of it may come
            self._tokens.popleft()
            self._latest = proposer
            pieces.extend(self._cut(len(spelled)))
        return pieces + self._cut(len(self._text))  # characters of several tokens, and servers that tell no tokens

    def _cut(self, size: int) -> list[Piece]:
        text, self._text = self._text[:size], self._text[size:]
        thought = min(self._reasoning, size)
        self._reasoning -= thought
        parts = ((text[:thought], True), (text[thought:], False))
        return [Piece(part, self._latest, is_reasoning) for part, is_reasoning in parts if part]
