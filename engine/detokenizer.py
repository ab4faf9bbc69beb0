"""Turns one request's output tokens into text as they come, and ends it at a stop string.

Owns the bytes of an unfinished character and the characters that may begin a stop. Knows nothing of steps or requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .request import SamplingParams
from .stop_strings import StopMatcher
from .token_bytes import table_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


@dataclass(slots=True)  # not frozen: one is made for every token, and freezing triples its cost
class Pushed:
    """What some tokens added."""

    text: str  # may be sent: no later token can change it
    num_kept: int | None = None  # a stop string was hit: so many of the pushed tokens belong to the output
    stop_reason: str | None = None  # the stop string


class Detokenizer:
    """The text of one request's output, token by token. However the tokens are split into pushes, the text is the same.

    The text continues the prompt: a sentencepiece tokenizer's leading space is kept unless nothing visible precedes it.
    Invalid bytes become U+FFFD as soon as they cannot become a character any more (at most three bytes ever wait).
    Of several stop strings the one that is complete first wins, of those the longest; as in vLLM, the text of the first
    min_tokens tokens is not searched.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._table = table_of(tokenizer)
        self._pieces = self._table.pieces
        self._skipped = self._table.special_ids if params.skip_special_tokens else frozenset[int]()
        self._at_text_start = all(token in self._skipped for token in reversed(prompt_token_ids))
        self._decoder = _utf8_decoder("replace")
        self._stops = StopMatcher(params.stop) if params.stop else None
        self._include_stop = params.include_stop_str_in_output
        self._num_unsearched = params.min_tokens  # tokens still to come whose text is not searched for stops
        self._held = ""  # the longest suffix of the text that may begin a stop
        self._stopped = False

    def push(self, token_ids: Sequence[int]) -> Pushed:
        """The text that these tokens make certain. After a stop was hit nothing more may be pushed."""
        assert not self._stopped, "tokens after a stop string"
        if self._stops is None:
            return Pushed(self._decoder.decode(b"".join([self._bytes(token) for token in token_ids])))
        parts: list[str] = []
        for index, token in enumerate(token_ids):
            new = self._decoder.decode(self._bytes(token))
            if self._num_unsearched > 0:
                self._num_unsearched -= 1
                parts.append(new)
            elif new:
                text, stop = self._search(self._stops, new)
                parts.append(text)
                if stop is not None:
                    return Pushed("".join(parts), index + 1, stop)
        return Pushed("".join(parts))

    def finish(self) -> str:
        """The rest of the text when no more tokens come: what was held back, and U+FFFD for an unfinished character."""
        if self._stopped:
            return ""
        rest = self._decoder.decode(b"", final=True)
        if self._stops is None:
            return rest
        text, _ = self._search(self._stops, rest)
        held, self._held = self._held, ""
        return text + held

    def _bytes(self, token: int) -> bytes:
        if token in self._skipped:
            return b""
        if self._at_text_start:
            self._at_text_start = False
            return self._table.first_piece(token)
        piece = self._pieces.get(token)
        return self._table.piece(token) if piece is None else piece

    def _search(self, stops: StopMatcher, new: str) -> tuple[str, str | None]:
        """Take new text in: what may be sent of it and of the held text, and the stop that ends the output."""
        text = self._held + new
        hit = stops.feed(new)
        if hit is None:
            cut = len(text) - stops.num_held
            self._held = text[cut:]
            return text[:cut], None
        end = len(self._held) + hit.end
        self._held, self._stopped = "", True
        return text[: end if self._include_stop else end - len(hit.stop)], hit.stop
