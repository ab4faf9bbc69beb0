"""Where the recurrent states of a draft model's requests lie, and which prefixes are remembered. Knows no network.

A draft reads nothing but tokens that are known: its guesses go on from the state behind them and leave it as it was, so nothing is ever
taken back.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from ..kernels.batch_lists import State
from ..kernels.record import record
from ..kernels.state_slots import StateSlots

SLOTS_PER_ROW = 3
"""Of each request: the state behind its known tokens, and two for chains by turns, of which one is that of the pass before."""

MOST_SEEN = 1 << 15
"""Blocks that are known again when another text begins with them."""


@record
class StateSeats:
    """How many requests may have states at once, and how many prefixes are remembered."""

    num_rows: int
    num_prefixes: int


@record
class FeedState:
    """Where a feed goes on and leaves its state, and where its chain's tokens do: as in RowStates."""

    row: State
    chain_slots: tuple[int, int]


@dataclass(slots=True)
class _Row:
    digests: list[bytes] = field(default_factory=list)  # of its full blocks, as far as they were asked for
    num_read: int = 0  # of them, when the planned pass is done, ...
    num_seen: int = 0  # ... and before it
    is_under_way: bool = False  # a pass was planned that nobody has said to be done


class DraftStates:
    """A request has a seat from its first pass on until it is forgotten. Those that find none free are left alone."""

    def __init__(self, room: StateSeats, block_size: int, max_tokens: int) -> None:
        """max_tokens: guesses of a chain, at most."""
        self._slots = StateSlots(room.num_rows, room.num_prefixes, block_size, SLOTS_PER_ROW, max_tokens + 1)
        self._block_size = block_size
        self._rows: dict[str, _Row] = {}
        self._seen: OrderedDict[bytes, None] = OrderedDict()  # digests of blocks that were read, the latest last

    def seat(self, request_id: str, token_ids: Sequence[int], num_held: int) -> int | None:
        """To be called before each pass. How many tokens the request's state holds; None = it finds no seat.

        num_held: leading tokens whose keys and values are in place: a prefix is looked for among them. Where the last pass was not said to
        be done its state is nobody's.
        """
        row = self._rows.get(request_id)
        if row is not None and not row.is_under_way:
            return num_held
        if row is not None:
            self.forget(request_id)
        if not self._slots.has_seat:
            return None
        row = self._rows[request_id] = _Row()
        self._name_blocks(row, token_ids, len(token_ids) - 1)
        known = list(takewhile(self._seen.__contains__, row.digests))  # where two texts part a state is worth keeping
        return self._slots.open(request_id, known, num_held // self._block_size) * self._block_size

    def plan(self, request_id: str, token_ids: Sequence[int], start: int, stop: int) -> FeedState:
        """For a pass over token_ids[start:stop], and a chain behind it."""
        row = self._rows[request_id]
        row.is_under_way, row.num_read = True, stop // self._block_size
        self._name_blocks(row, token_ids, stop)
        state = self._slots.row(request_id, start, stop, stop == len(token_ids), True)
        first, second = self._slots.others(request_id)
        return FeedState((state.source, state.target, 0, stop - start, state.copy_place, state.copy_slot), (first, second))

    def passed(self, request_id: str) -> None:
        """The planned pass is done."""
        row = self._rows[request_id]
        row.is_under_way = False
        self._slots.passed(request_id, 0, row.digests)
        for digest in row.digests[row.num_seen : row.num_read]:
            self._seen[digest] = None
            self._seen.move_to_end(digest)
        row.num_seen = row.num_read
        while len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)

    def forget(self, request_id: str) -> None:
        if self._rows.pop(request_id, None) is not None:
            self._slots.free(request_id)

    def check(self) -> None:
        self._slots.check({*self._rows})

    def _name_blocks(self, row: _Row, token_ids: Sequence[int], num_tokens: int) -> None:
        size, digests = self._block_size, row.digests
        for start in range(len(digests) * size, num_tokens // size * size, size):
            tokens = array("i", token_ids[start : start + size]).tobytes()
            digests.append(hashlib.sha256((digests[-1] if digests else b"") + tokens).digest())
