"""Turns one request's output tokens into text as they come, and ends it at a stop string.

Owns the bytes of an unfinished character and the characters that may begin a stop. Knows nothing of steps or requests.
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from .request import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_utf8_decoder = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class Pushed:
    """What some tokens added."""

    text: str  # may be sent: no later token can change it
    num_kept: int | None = None  # a stop string was hit: so many of the pushed tokens belong to the output
    stop_reason: str | None = None  # the stop string


class Detokenizer:
    """The text of one request's output, token by token. Whatever way the tokens are split into pushes, the text is the same.

    The text continues the prompt: a sentencepiece tokenizer's leading space is kept unless nothing visible precedes it.
    Invalid bytes become U+FFFD as soon as they cannot become a character any more (at most three bytes are ever waiting).
    Of several stop strings the one that is complete first wins, of those the longest; as in vLLM, text of the first
    min_tokens tokens is not searched.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        table = _tables.get(tokenizer)
        if table is None:
            table = _tables[tokenizer] = TokenBytes(tokenizer)
        self._table = table
        self._pieces = table.pieces
        self._skipped = table.special_ids if params.skip_special_tokens else frozenset[int]()
        self._at_text_start = all(token in self._skipped for token in reversed(prompt_token_ids))
        self._decoder = _utf8_decoder("replace")
        self._stops = StopMatcher(tuple(params.stop)) if params.stop else None
        self._include_stop = params.include_stop_str_in_output
        self._num_unsearched = params.min_tokens  # tokens still to come whose text is not searched for stops
        self._held = ""  # the longest suffix of the text that may begin a stop
        self._stopped = False

    def push(self, token_ids: Sequence[int]) -> Pushed:
        """The text that token_ids make certain. After a stop was hit, nothing more may be pushed."""
        assert not self._stopped, "tokens after a stop string"
        parts: list[str] = []
        for index, token in enumerate(token_ids):
            if token in self._skipped:
                new = ""
            elif self._at_text_start:
                self._at_text_start = False
                new = self._decoder.decode(self._table.first_piece(token))
            else:
                piece = self._pieces.get(token)
                new = self._decoder.decode(self._table.piece(token) if piece is None else piece)
            if self._stops is None:
                parts.append(new)
            elif self._num_unsearched > 0:
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
        text, stop = self._search(self._stops, rest)
        held, self._held = self._held, ""
        return text if stop is not None else text + held

    def _search(self, stops: StopMatcher, new: str) -> tuple[str, str | None]:
        """Take new text in: what may be sent of it and of the held text, and the stop that ends the output."""
        text = self._held + new
        hit = stops.feed(new)
        if hit is None:
            cut = len(text) - stops.num_held
            self._held = text[cut:]
            return text[:cut], None
        stop, end = hit
        end += len(self._held)
        self._held, self._stopped = "", True
        return text[: end if self._include_stop else end - len(stop)], stop


class TokenBytes:
    """The bytes that each token of a vocabulary adds to a text, looked up once per token.

    Asking the tokenizer to decode an anchor and the token works for every decoder whose tokens mean the same everywhere
    but at the start of a text (byte-level, sentencepiece, Metaspace). Only tokens that are part of a character, which a
    text cannot show, are read from their names.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        # The tables outlive requests, not their tokenizer: they are keyed by it weakly, so a strong reference needs a detour.
        self._decode = _decoder_of(tokenizer)
        self._name = _namer_of(tokenizer)
        self.special_ids = frozenset(
            [*tokenizer.all_special_ids, *(i for i, added in tokenizer.added_tokens_decoder.items() if added.special)]
        )
        self._anchor = self._find_anchor(tokenizer)
        self._anchor_text = self._decode(self._anchor)
        self.pieces: dict[int, bytes] = {}

    def piece(self, token: int) -> bytes:
        """Bytes of a token that follows visible text; b"" for ids the tokenizer does not have."""
        piece = self.pieces.get(token)
        if piece is None:
            text = self._decode([*self._anchor, token])
            text = text.removeprefix(self._anchor_text) if text.startswith(self._anchor_text) else self._decode([token])
            piece = self.pieces[token] = self._raw_bytes(token, text)
        return piece

    def first_piece(self, token: int) -> bytes:
        """Bytes of a token that begins a text: sentencepiece drops its leading space there."""
        return self._raw_bytes(token, self._decode([token]))

    def _raw_bytes(self, token: int, text: str) -> bytes:
        if "\ufffd" not in text:
            return text.encode("utf-8", "replace")
        name = self._name(token)
        if match := _BYTE_TOKEN.fullmatch(name):
            return bytes([int(match[1], 16)])
        try:
            return bytes(_BYTE_OF_CHAR[char] for char in name)
        except KeyError:  # the token really spells U+FFFD
            return text.encode("utf-8", "replace")

    def _find_anchor(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """One token that shows as plain ASCII without spaces; none in a vocabulary without such a token."""
        for token in [*tokenizer.encode("a", add_special_tokens=False), *range(len(tokenizer))]:
            text = self._decode([token])
            if token not in self.special_ids and text and text.isascii() and text.isalnum():
                return [token]
        return []
