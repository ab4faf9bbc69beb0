"""The bytes that each token of a vocabulary adds to a text, whatever kind of tokenizer it is. Knows no output and no stop."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from ..proposers.vocabularies import byte_letters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Of one tokenizer, each token's found out once.

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
        table = byte_letters()
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
def table_of(tokenizer: PreTrainedTokenizerBase) -> TokenBytes:
    """One table serves all requests of a tokenizer."""
    return TokenBytes(tokenizer)
