"""A ragged batch in the making: plain lists, then arrays of one piece of memory, which the next batch of that shape may take over.

After a pass that has read all weights every call into numpy or torch finds the processor's caches empty, and costs several times what
it does in a loop. So all numbers are written by two calls, and where a batch is done with before the next is made, the tensors on
that memory stay as well.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from struct import Struct

import torch

from .layout import RaggedBatch, RowStates

KEPT_SHAPES = 256
KEPT_TOKENS = 512                    # of a batch whose memory is kept
TABLE_STEP = 8                       # kept tables are wider by up to so many blocks: a row's grows every few steps

Shape = tuple[int, int, int, int, int, bool, bool, bool]
State = tuple[int, int, int, int, int, int]
"""Source, target, accepted, known tokens, place and slot of a copy: as in RowStates."""


@dataclass(slots=True)
class BatchLists:
    """What a RaggedBatch holds, row after row. At least one row."""

    block_size: int
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    tree_mask: list[int] = field(default_factory=list)
    logits_indices: list[int] = field(default_factory=list)
    full_logits: list[int] = field(default_factory=list)
    query_start_loc: list[int] = field(default_factory=lambda: [0])
    seq_lens: list[int] = field(default_factory=list)
    num_causal: list[int] = field(default_factory=list)
    first_places: list[int] = field(default_factory=list)    # one a row, or none at all: then all are 0
    tables: list[Sequence[int]] = field(default_factory=list)
    adapters: list[int] = field(default_factory=list)        # one a row, or none at all, too
    states: list[State] = field(default_factory=list)        # the same

    def add_slots(self, table: Sequence[int], start: int, stop: int) -> None:
        """Of places start to stop - 1 of the row that is being added."""
        size = self.block_size
        self.slots += [table[place // size] * size + place % size for place in range(start, stop)]

    def batch(self) -> RaggedBatch:
        """In memory of its own."""
        return _Arrays(self.shape(1), self.block_size).filled(self)

    def shape(self, table_step: int) -> Shape:
        width = max(1, *map(len, self.tables))
        return (
            len(self.token_ids), len(self.seq_lens), len(self.logits_indices), len(self.full_logits),
            -(-width // table_step) * table_step, any(self.first_places), any(self.adapters), bool(self.states),
        )


class BatchMemory:
    """Batches of one owner, who is done with each before the next is made: then small ones lie where the last of their shape lay.

    All of them have blocks of the same size.
    """

    def __init__(self) -> None:
        self._kept: dict[Shape, _Arrays] = {}

    def batch(self, lists: BatchLists) -> RaggedBatch:
        """Good until the next call."""
        shape = lists.shape(TABLE_STEP)
        arrays = self._kept.get(shape)
        if arrays is None:
            arrays = _Arrays(shape, lists.block_size)
            if len(lists.token_ids) <= KEPT_TOKENS:
                if len(self._kept) >= KEPT_SHAPES:
                    self._kept.clear()
                self._kept[shape] = arrays
        return arrays.filled(lists)


class _Arrays:
    """The batch of one shape, and the memory that it lies in."""

    def __init__(self, shape: Shape, block_size: int) -> None:
        num_tokens, num_rows, num_logits, num_full, self._width, has_firsts, has_adapters, has_states = shape
        wide_sizes = [num_tokens] * 4 + [num_logits, num_full, num_rows * has_states]
        optional = [num_rows * has_firsts, num_rows * has_adapters, *[num_rows * has_states] * 5]
        narrow_sizes = [num_rows + 1, num_rows, num_rows, *optional, num_rows * self._width]
        self._has_firsts, self._has_adapters, self._has_states = has_firsts, has_adapters, has_states
        self._wide, self._narrow = Struct(f"={sum(wide_sizes)}q"), Struct(f"={sum(narrow_sizes[:-1])}i")
        self._wide_memory, self._narrow_memory = bytearray(max(8, self._wide.size)), bytearray(4 * sum(narrow_sizes))
        wide = torch.frombuffer(self._wide_memory, dtype=torch.int64)[: sum(wide_sizes)].split_with_sizes(wide_sizes)
        narrow = torch.frombuffer(self._narrow_memory, dtype=torch.int32).split_with_sizes(narrow_sizes)
        self._batch = RaggedBatch(
            token_ids=wide[0],
            positions=wide[1],
            slot_mapping=wide[2],
            query_start_loc=narrow[0],
            seq_lens=narrow[1],
            block_tables=narrow[10].view(num_rows, self._width),
            num_causal=narrow[2],
            tree_mask=wide[3],
            logits_indices=wide[4],
            full_logits=wide[5],
            block_size=block_size,
            first_places=narrow[3] if has_firsts else None,
            adapters=narrow[4] if has_adapters else None,
            states=RowStates(narrow[5], narrow[6], wide[6], *narrow[7:10]) if has_states else None,
        )

    def filled(self, lists: BatchLists) -> RaggedBatch:
        """The batch, with these numbers. lists: of this shape."""
        numbers = [*lists.token_ids, *lists.positions, *lists.slots, *lists.tree_mask, *lists.logits_indices, *lists.full_logits]
        states = [*zip(*lists.states, strict=True)] if self._has_states else []
        if states:
            numbers += states.pop(2)
        self._wide.pack_into(self._wide_memory, 0, *numbers)
        numbers = [*lists.query_start_loc, *lists.seq_lens, *lists.num_causal]
        if self._has_firsts:
            numbers += lists.first_places
        if self._has_adapters:
            numbers += lists.adapters
        for kept in states:
            numbers += kept
        self._narrow.pack_into(self._narrow_memory, 0, *numbers)
        self._narrow_memory[self._narrow.size :] = packed_tables(lists.tables, self._width)
        return self._batch


def packed_tables(tables: Sequence[Sequence[int]], width: int) -> bytes:
    """[R, width] int32, zeros behind each. They are long; those that are arrays have the form already."""
    parts = [(table if type(table) is array else array("i", table)).tobytes() for table in tables]
    return b"".join([part.ljust(4 * width, b"\0") for part in parts])
