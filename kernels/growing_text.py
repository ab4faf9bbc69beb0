"""Texts that grow, where native code can read them, and which of them end with tokens that they had before."""

import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence
from ctypes import c_bool, c_int32, c_void_p
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import native_library


class GrowingText:
    """The tokens of one row, as int32, in memory of their own."""

    __slots__ = ("_memory", "num_tokens", "address")

    def __init__(self, room: int = 0) -> None:
        """room: tokens that it may have before its address changes."""
        self._memory = array("i", bytes(4 * room))
        self.num_tokens = 0
        self.address = self._memory.buffer_info()[0]  # of the first token, until the text outgrows its room

    def follow(self, token_ids: Sequence[int]) -> None:
        """Take in what has come. What was `taken` and is not in there was not kept."""
        known, total = self.num_tokens, len(token_ids)
        if known >= total:
            self.num_tokens = total
            return
        memory = self._memory
        if total > len(memory):
            memory.extend(array("i", bytes(4 * (2 * total - len(memory)))))
            self.address = memory.buffer_info()[0]
        memory[known:total] = array("i", token_ids[known:])
        self.num_tokens = total

    def taken(self, num_new: int) -> list[int]:
        """Somebody else has written so many tokens behind those that are known: these."""
        first = self.num_tokens
        self.num_tokens += num_new
        return self._memory[first : self.num_tokens].tolist()

    def as_array(self) -> NDArray[np.int32]:
        """[num_tokens] of the memory itself: let go of it before the text grows."""
        return np.frombuffer(self._memory, np.int32, self.num_tokens)


def repeats(texts: Sequence[GrowingText], n: int) -> list[bool]:
    """Of each text, whether its last n tokens stand somewhere before its end, too. They may overlap it. n: at least 1."""
    native = _native()
    if native is None:
        return [ends_with_repeat(text.as_array(), n) for text in texts]
    if len(texts) == 1:
        return [native.of_one(texts[0].address, texts[0].num_tokens, n)]
    addresses = array("Q", [text.address for text in texts])
    lengths = array("i", [text.num_tokens for text in texts])
    found = array("B", bytes(len(texts)))
    native.of_many(addresses.buffer_info()[0], lengths.buffer_info()[0], len(texts), n, found.buffer_info()[0])
    return list(map(bool, found))


def ends_with_repeat(tokens: NDArray[np.int32], n: int) -> bool:
    """`repeats` of one text, where no native code reads it."""
    num_earlier = len(tokens) - n
    if num_earlier < 1:
        return False
    same = np.ones(num_earlier, bool)
    for i in range(n):
        same &= tokens[i : i + num_earlier] == tokens[num_earlier + i]
    return bool(same.any())


class _Native(NamedTuple):
    """Functions of native/text.cpp. They keep the interpreter's lock: to let go of it for microseconds may cost milliseconds."""

    of_one: Callable[[int, int, int], bool]
    of_many: Callable[[int, int, int, int, int], None]


@functools.cache
def _native() -> _Native | None:
    library = native_library.load()
    if library is None:
        return None
    one = ctypes.PYFUNCTYPE(c_bool, c_void_p, c_int32, c_int32)
    many = ctypes.PYFUNCTYPE(None, c_void_p, c_void_p, c_int32, c_int32, c_void_p)
    return _Native(one(("ft_ends_with_repeat", library)), many(("ft_end_with_repeats", library)))
