"""What follows short runs of tokens: a hash table that Python and native code (native/ngram_table.h) read where it lies.

A run's key is folded from its last token backwards, so that the keys of all runs that a text ends with cost one pass. Keys stand in
ascending order, each at the place that its first bits say or soon behind it: a search ends at the first greater one.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MOST_N = 8  # kMostN of native/ngram_table.h
_MULTIPLIER = 0xD6E8FEB86659FD93
_MASK = 0xFFFFFFFFFFFFFFFF
_FOLD = 32
_NOBODY = -1  # token of an empty place


class NgramTable:
    """Immutable. The longest known run counts; what is guessed behind it comes with the chance that it is right.

    Native code has the addresses of its arrays: keep it as long as they are used.
    """

    def __init__(self, runs: Sequence[NDArray[np.integer]], token_ids: NDArray[np.integer], chances: NDArray[np.floating]) -> None:
        """runs: of lengths 1, 2, ...: [E_n, n] token ids. token_ids, chances: [E], E = the sum of E_n, in the same order.

        Of two runs with the same tokens one counts. Raises ValueError for more lengths than native code has room for.
        """
        if not 1 <= len(runs) <= MOST_N:
            raise ValueError(f"runs of {len(runs)} lengths, but a table has 1 to {MOST_N}")
        assert sum(map(len, runs)) == len(token_ids) == len(chances), "each run says one token"
        self.max_n = len(runs)
        self.num_runs = len(token_ids)
        keys, first = np.unique(np.concatenate([_keys(run) for run in runs]), return_index=True)
        self.shift = 64 - max(1, (len(keys) * 5 // 4).bit_length())  # at most four of five places taken
        order = np.arange(len(keys))
        places = order + np.maximum.accumulate((keys >> np.uint64(self.shift)).astype(np.int64) - order)
        size = max((1 << (64 - self.shift)), int(places.max(initial=-1)) + 1) + 1  # the last place is empty
        self.keys = np.zeros(size, np.uint64)
        self.token_ids = np.full(size, _NOBODY, np.int32)
        self.chances = np.zeros(size, np.float32)
        self.keys[places] = keys
        self.token_ids[places] = token_ids[first]
        self.chances[places] = chances[first]
        self.addresses = tuple(array.ctypes.data for array in (self.keys, self.token_ids, self.chances))
        self._keys, self._token_ids, self._chances = self.keys.data, self.token_ids.data, self.chances.data  # ten times as fast to read

    def next(self, text: Sequence[int]) -> tuple[int, float] | None:
        """What follows, and its chance; None if the text ends with no known run."""
        key, found = 0, None
        for n in range(1, min(self.max_n, len(text)) + 1):
            key = _fold(key, text[-n])
            if (place := self._find(key)) is not None:
                found = place
        return None if found is None else (self._token_ids[found], self._chances[found])

    def chain(self, text: Sequence[int], most: int, least_chance: float) -> tuple[list[int], list[float]]:
        """Up to `most` tokens that follow, and the chance of each if those before it are right.

        Ends before the first that is right with all before it with less than least_chance.
        """
        tail = list(text[-self.max_n :])
        token_ids: list[int] = []
        chances: list[float] = []
        together = np.float32(1.0)  # as in native code, to the bit
        while len(token_ids) < most and (step := self.next(tail)) is not None:
            together *= np.float32(step[1])
            if together < least_chance:
                break
            token_ids.append(step[0])
            chances.append(step[1])
            tail.append(step[0])
        return token_ids, chances

    def _find(self, key: int) -> int | None:
        keys, token_ids = self._keys, self._token_ids
        place = key >> self.shift
        while keys[place] < key and token_ids[place] != _NOBODY:
            place += 1
        return place if keys[place] == key and token_ids[place] != _NOBODY else None


def _fold(key: int, token_id: int) -> int:
    key = ((key ^ (token_id + 1)) * _MULTIPLIER) & _MASK
    return key ^ (key >> _FOLD)


def _keys(runs: NDArray[np.integer]) -> NDArray[np.uint64]:
    """[E] of runs [E, n]."""
    keys = np.zeros(len(runs), np.uint64)
    for column in reversed(runs.T):
        keys = (keys ^ (column.astype(np.uint64) + np.uint64(1))) * np.uint64(_MULTIPLIER)
        keys ^= keys >> np.uint64(_FOLD)
    return keys
