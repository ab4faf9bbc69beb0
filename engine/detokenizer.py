"""Turns one request's output tokens into text as they come, and ends it at a stop string.

Owns the bytes of an unfinished character and the characters that may begin a stop. Knows nothing of steps or requests.
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from .request import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
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
        self._table = _table_of(tokenizer)
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
        parts: list[str] = []
        for index, token in enumerate(token_ids):
            new = self._decoder.decode(self._bytes(token))
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


class TokenBytes:
    """The bytes that each token of a vocabulary adds to a text, found out once per token.

    Decoding an anchor and the token gives them for every decoder whose tokens mean the same everywhere but at the start
    of a text (byte-level, sentencepiece, Metaspace). Only tokens that are a part of a character, which no text can show,
    are read from their names.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self.special_ids = frozenset([*tokenizer.all_special_ids, *(token for token, entry in added.items() if entry.special)])
        self.pieces: dict[int, bytes] = {}  # what `piece` has found so far
        self._anchor = self._find_anchor()
        self._anchor_text = self._decode(self._anchor)

    def piece(self, token: int) -> bytes:
        """Bytes of a token that follows visible text; b"" for ids that the tokenizer does not have."""
        piece = self.pieces.get(token)
        if piece is None:
            text = self._decode([*self._anchor, token])
            text = text[len(self._anchor_text) :] if text.startswith(self._anchor_text) else self._decode([token])
            piece = self.pieces[token] = self._exact_bytes(token, text)
        return piece

    def first_piece(self, token: int) -> bytes:
        """Bytes of a token that begins a text: sentencepiece drops its leading space there."""
        return self._exact_bytes(token, self._decode([token]))

    def _exact_bytes(self, token: int, text: str) -> bytes:
        if "\ufffd" not in text:
            return text.encode()
        name = self._tokenizer.convert_ids_to_tokens(token)
        assert isinstance(name, str)
        if match := _BYTE_TOKEN.fullmatch(name):
            return bytes([int(match[1], 16)])
        table = _byte_of_char()
        if all(char in table for char in name):
            return bytes(table[char] for char in name)
        return text.encode()  # the token does spell U+FFFD

    def _find_anchor(self) -> list[int]:
        """One token that shows as plain letters or digits; none for a vocabulary without such a token."""
        for token in [*self._tokenizer.encode("a", add_special_tokens=False), *range(len(self._tokenizer))]:
            text = self._decode([token])
            if token not in self.special_ids and text.isascii() and text.isalnum():
                return [token]
        return []

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


@lru_cache(maxsize=4)
def _table_of(tokenizer: PreTrainedTokenizerBase) -> TokenBytes:
    """One table serves all requests of a tokenizer."""
    return TokenBytes(tokenizer)


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """How byte-level BPE (GPT-2) spells bytes in token names: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


@dataclass(frozen=True, slots=True)
class Hit:
    """A stop string that became complete."""

    stop: str
    end: int  # characters of the text just fed, up to the stop's end


class StopMatcher:
    """Finds the first of some strings in a growing text, one character at a time (Aho and Corasick, 1975).

    A state is the longest suffix of the text that begins a stop: its length is what must be held back. The cost does not
    depend on the number of stops nor on their length, so no choice of stops can slow the engine down.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]  # per state: character -> longer state
        self._depth = [0]
        self._complete: list[str | None] = [None]  # the longest stop that is a suffix of the state
        for stop in stops:
            self._insert(stop)
        self._fallback = [0] * len(self._next)  # the longest state that is a proper suffix of this one
        self._link()
        self._state = 0

    @property
    def num_held(self) -> int:
        """Trailing characters of the text that may begin a stop."""
        return self._depth[self._state]

    def feed(self, text: str) -> Hit | None:
        """Take in more text, up to the end of the first stop."""
        state, root = self._state, self._next[0]
        for index, char in enumerate(text):
            if not state and char not in root:
                continue
            state = self._step(state, char)
            stop = self._complete[state]
            if stop is not None:
                return Hit(stop, index + 1)
        self._state = state
        return None

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(char, 0)

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._complete.append(None)
            state = self._next[state][char]
        self._complete[state] = stop

    def _link(self) -> None:
        """Fallbacks breadth first: those of shorter states are known when a longer one asks."""
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for char, longer in self._next[state].items():
                self._fallback[longer] = self._step(self._fallback[state], char)
                waiting.append(longer)
            if self._complete[state] is None:
                self._complete[state] = self._complete[self._fallback[state]]
