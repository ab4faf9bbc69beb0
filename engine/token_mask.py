"""Sets of tokens as bits: bit t % 32 of word t / 32 stands for token t. What grammars, budgets and samplers say "may come" in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def bits_of(token_ids: Sequence[int] | NDArray[np.int64], num_tokens: int) -> NDArray[np.uint32]:
    """[ceil(num_tokens / 32)] with the bits of these tokens set, all below num_tokens."""
    bits = np.zeros(-(-num_tokens // 32) * 32, bool)
    bits[token_ids] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)


class Mask:
    """Which tokens may come. `address` is that of `bits`, for native code."""

    __slots__ = ("address", "bits")

    def __init__(self, num_words: int) -> None:
        self.bits: NDArray[np.uint32] = np.zeros(num_words, np.uint32)
        self.address: int = self.bits.ctypes.data

    @classmethod
    def of(cls, token_ids: Sequence[int] | NDArray[np.int64], num_tokens: int) -> Mask:
        """Exactly these; num_tokens: ids are below it."""
        mask = cls(-(-num_tokens // 32))
        mask.bits[:] = bits_of(token_ids, num_tokens)
        return mask

    def allows(self, token: int) -> bool:
        return bool(int(self.bits[token >> 5]) >> (token & 31) & 1)

    @property
    def only(self) -> int | None:
        """The one token that may come; None if there are several."""
        words = self.bits.nonzero()[0]
        if len(words) != 1:
            return None
        word = int(self.bits[words[0]])
        return None if word & (word - 1) else 32 * int(words[0]) + word.bit_length() - 1

    def to_bool(self, vocab_size: int) -> NDArray[np.bool_]:
        """[vocab_size]"""
        return np.unpackbits(self.bits.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)
