"""Several passes in one call, each over what the one before it said: plain data in and out. Knows no requests.

A row's guesses are what its own text, a prediction of it, a table of n-grams or a smaller network says next; those that the target would
have said are kept, and the next round goes on behind them. Where tokens of a pass cost little, a network's next best ones are
verified too, each instead of a guess: a chain with leaves. proposers/ngram.py, prediction.py, ngram_cache.py and drafting.py say what is
guessed, engine/verifier.py what is kept.

Numbers are packed by `struct`, not by numpy: they are few, and after a pass that has read all weights each call into numpy takes ten
times what it does in a loop.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple, Protocol, runtime_checkable

from .layout import Executor, KVTensors
from .ngram_table import NgramTable
from .record import record
from .sampling import ROW as SAMPLING_ROW

FROM_PREDICTION, FROM_TEXT, FROM_TABLE, FROM_DRAFT = 0, 1, 2, 3
_ROW = Struct("4Q16i2f6i")
_ADAPTER = _NUM_READ = Struct("i")
_ANSWER = Struct("3i")
_DRAFT = Struct("6if")
_ANSWER_OFFSET = _ROW.size - _ANSWER.size
_NUM_READ_OFFSET = _ANSWER_OFFSET - _NUM_READ.size
_ADAPTER_OFFSET = _NUM_READ_OFFSET - _ADAPTER.size
ROW_BYTES = _ROW.size + SAMPLING_ROW.itemsize
ALTERNATES_PER_GUESS = 2  # at most; native/draft_chains.cpp has the same


class RoundsRow(NamedTuple):
    """The struct RoundsRow of native/network.h, which says what each field means; behind it come the bytes of a sampling.ROW.

    Who fills in an address keeps what it points to.
    """

    text: int
    table: int
    prediction: int
    stops: int
    num_prompt: int
    num_known: int
    most_new: int
    num_blocks: int
    num_places: int
    num_stops: int
    num_predicted: int
    cursor: int
    is_lost: int
    num_followed: int
    predicted_k: int
    lookup_k: int
    lookup_min: int
    lookup_max: int
    latest: int
    table_k: int = 0
    text_gain: float = 0.0
    trust: float = 1.0
    draft_k: int = 0
    adapter: int = 0
    num_read: int = 0
    num_new: int = 0
    has_ended: int = 0
    has_failed: int = 0

    def packed(self, sampling: bytes) -> bytes:
        return _ROW.pack(*self) + sampling


class RoundsDraft(NamedTuple):
    """One guess and what became of it: the struct RoundsDraft."""

    row: int
    source: int
    first: int
    drafted: int
    accepted: int
    emitted: int
    expected: float


@record
class Drafter:
    """A network that guesses in rounds, token after token, and its cache behind the rows' blocks: the struct RoundsDrafter."""

    executor: Executor  # of the same kind as the target's
    kv: KVTensors
    choosable: int  # token ids below it may be guessed
    readable: int  # texts of ids below it can be read, ...
    max_length: int  # ... and only if they are shorter than this
    samples: bool  # whether a row's guesses are drawn as its tokens are; else they are the best
    threshold: float  # the first guess less likely than this is the last of its chain


@record
class RoundsLimits:
    """Of one call."""

    most_rounds: int
    most_tokens: int  # of one pass, at least the number of rows
    most_seconds: float  # after which no further round begins
    ends_with_row: bool  # none begins either once a row has ended
    prices: Sequence[float] = ()  # of 0, 1, ... guesses from the table: tokens that so many must bring; no row guesses more


@record
class RoundsOutput:
    """What the rounds of a call did; the tokens are in the rows' texts."""

    drafts: Sequence[RoundsDraft]  # round by round
    seconds: array[float]  # [rounds] that each pass took, ...
    draft_seconds: array[float]  # ... and the drafter before it
    tokens: array[int]  # [rounds] that it computed


@runtime_checkable
class RoundsExecutor(Protocol):
    """A network that can stay inside one call for several rounds."""

    def most_at_once(self) -> int:
        """Tokens up to which a pass of chains is filled with alternates, as it takes little longer for them; 1 = with none."""
        ...

    def run_rounds(
        self,
        rows: bytearray,
        kv: KVTensors,
        limits: RoundsLimits,
        interrupt: array[int],
        table: NgramTable | None = None,
        drafter: Drafter | None = None,
    ) -> RoundsOutput:
        """Rounds over packed rows [R], which are changed in place. table, drafter: needed where a row has a table_k or a draft_k.

        Ends with the round in which a limit is reached, all rows have ended, one fails or has no place left, or `interrupt` [1] is no
        longer 0: another thread may write it at any time.
        """
        ...


def answers(rows: bytearray) -> list[tuple[int, int, int]]:
    """Of each packed row, its num_new, has_ended and has_failed."""
    return [_ANSWER.unpack_from(rows, start + _ANSWER_OFFSET) for start in range(0, len(rows), ROW_BYTES)]


def adapters_of(rows: bytearray) -> list[int]:
    """Of each packed row, its adapter."""
    return [_ADAPTER.unpack_from(rows, start + _ADAPTER_OFFSET)[0] for start in range(0, len(rows), ROW_BYTES)]


def nums_read(rows: bytearray) -> list[int]:
    """Of each packed row, its num_read."""
    return [_NUM_READ.unpack_from(rows, start + _NUM_READ_OFFSET)[0] for start in range(0, len(rows), ROW_BYTES)]


def cursors(rows: bytearray) -> list[tuple[int, int, int]]:
    """Of each packed row, its cursor, is_lost and num_followed."""
    unpacked = (RoundsRow(*_ROW.unpack_from(rows, start)) for start in range(0, len(rows), ROW_BYTES))
    return [(row.cursor, row.is_lost, row.num_followed) for row in unpacked]


def drafts_in(memory: bytearray, count: int) -> list[RoundsDraft]:
    """The first `count` structs RoundsDraft."""
    return [RoundsDraft(*fields) for fields in _DRAFT.iter_unpack(memoryview(memory)[: count * _DRAFT.size])]


def draft_memory(count: int) -> bytearray:
    return bytearray(count * _DRAFT.size)
