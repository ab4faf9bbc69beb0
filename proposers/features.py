"""Hidden states of the target on their way to a drafter that reads them: what it has not read yet, request by request.

Owns the buffers. Knows no network and not what the states are for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..kernels.record import record
from ..kernels.started import Fetched
from ..kernels.upload import upload
from .base import Feedback

MAX_BUFFERED = 256
"""States of one request that wait for a drafter that is not asked; older ones are dropped, and it starts anew behind them."""

WHOLE_STEP = 16
"""A step of at most so many tokens a row is held as it is, by all of its rows: cutting each row's out costs more than the drafter saves."""

MOST_WASTE = 4
"""... unless it has more than so many times the tokens that were kept: many such steps may be held."""

MOST_PIECES = 16
"""Steps whose states one request holds on a device before its own are cut out: others' lie beside them, and memory is short there."""

MOST_NEW_EDGES = 64
"""States of blocks' last positions that stay on a device before they are brought to the host."""


@record
class _Piece:
    """Rows begin:end of tensors [T, ...] that stand side by side."""

    columns: Sequence[Tensor]
    begin: int
    end: int

    def cut(self) -> Tensor:
        """[end - begin, width] float32 in memory of its own."""
        return torch.cat([column[self.begin : self.end] for column in self.columns], -1).float()


@dataclass(slots=True)
class _Held:
    """States of positions start:stop, in pieces that begin at position `first`, which may lie before `start`."""

    start: int
    stop: int
    first: int
    pieces: deque[_Piece] = field(default_factory=deque)

    def add(self, piece: _Piece) -> None:
        self.pieces.append(piece)
        self.stop += piece.end - piece.begin

    def drop_before(self, position: int) -> None:
        self.start = position
        while self.pieces and self.first + self.pieces[0].end - self.pieces[0].begin <= position:
            piece = self.pieces.popleft()
            self.first += piece.end - piece.begin

    def rows(self, start: int, stop: int, step: int = 1) -> Tensor:
        """[n, width] float32 of positions start:stop:step."""
        if len(self.pieces) > 1 or len(self.pieces[0].columns) > 1:
            parts = [piece.cut() for piece in self.pieces]
            states = torch.cat(parts) if len(parts) > 1 else parts[0]
            self.pieces = deque([_Piece([states], 0, states.shape[0])])
        (piece,) = self.pieces
        begin = piece.begin - self.first
        return piece.columns[0][begin + start : begin + stop : step].float()


class Features:
    """The states of `boundaries` side by side, a row for each position, as they become known.

    The last state of each cache block is kept for as long as the block is: whoever takes a block over from the prefix cache
    finds the one state there that its first own entry is made of.
    """

    def __init__(self, boundaries: Sequence[int], width: int, num_blocks: int, block_size: int, max_buffered: int = MAX_BUFFERED) -> None:
        """boundaries: ids in the order of the columns; width: of all of them together."""
        self.boundaries = tuple(boundaries)
        self.width = width
        self.block_size = block_size
        self._max_buffered = max_buffered
        self._held: dict[str, _Held] = {}
        self._edges = torch.empty(num_blocks, width, dtype=torch.float32)  # of each block's last position; memory is taken as it is used
        self._new_edges: dict[int, Tensor] = {}  # block -> [width], later than what stands there: on a device until they are many
        self._leaving: tuple[dict[int, Tensor], Fetched] | None = None  # those that were many last, and their copy on its way
        self._device = torch.device("cpu")  # where the target leaves its states

    @staticmethod
    def bytes_per_block(width: int) -> int:
        return 4 * width

    def observe(self, feedback: Feedback) -> None:
        """Take in the states of everything that the step committed."""
        if not feedback.hidden:
            return
        columns = [feedback.hidden[boundary] for boundary in self.boundaries]
        self._device = columns[0].device
        num_tokens = feedback.query_start_loc[-1]
        num_kept = sum(feedback.num_scheduled) + sum(map(len, feedback.accepted))
        is_whole = num_tokens <= min(WHOLE_STEP * len(feedback.request_ids), MOST_WASTE * num_kept)
        for i, request_id in enumerate(feedback.request_ids):
            if feedback.finished[i]:
                continue
            begin, known, path = feedback.query_start_loc[i], feedback.num_scheduled[i], feedback.accepted[i]
            piece = _Piece(columns, begin, begin + known + len(path))
            if list(path) != list(range(len(path))):
                rows = upload(torch.tensor([*range(begin, begin + known), *(begin + known + node for node in path)]), self._device)
                piece = _Piece([column[rows] for column in columns], 0, len(rows))
            elif not is_whole:
                piece = _Piece([piece.cut()], 0, known + len(path))
            self._append(request_id, feedback.num_committed[i] - known - len(path), piece)

    def span(self, request_id: str) -> tuple[int, int] | None:
        """Positions start:stop whose states are here; None for none."""
        held = self._held.get(request_id)
        return None if held is None else (held.start, held.stop)

    def rows(self, request_id: str, start: int, stop: int) -> Tensor:
        """[stop - start, width] states of positions start:stop; zeros for the position before the text, -1."""
        if start < 0:
            return torch.cat([torch.zeros(-start, self.width, device=self._device, dtype=torch.float32), self.rows(request_id, 0, stop)])
        if start == stop:
            return torch.zeros(0, self.width, device=self._device, dtype=torch.float32)
        held = self._held[request_id]
        assert held.start <= start and stop <= held.stop, "states are asked for that are not here"
        return held.rows(start, stop)

    def drop_before(self, request_id: str, position: int) -> None:
        """States of earlier positions have been read."""
        held = self._held.get(request_id)
        if held is not None and position > held.start:
            held.drop_before(min(position, held.stop))

    def keep_edges(self, request_id: str, block_table: Sequence[int]) -> None:
        """Remember, for each block that ends among the states held, its last one."""
        held, size = self._held.get(request_id), self.block_size
        if held is None:
            return
        first = held.start + -(held.start + 1) % size
        if first >= held.stop:
            return
        states = held.rows(first, held.stop, size)
        blocks = [block_table[position // size] for position in range(first, held.stop, size)]
        if states.device.type == "cpu":
            self._edges.index_copy_(0, torch.tensor(blocks), states)
            return
        self._new_edges.update(zip(blocks, states.clone(), strict=True))
        if len(self._new_edges) >= MOST_NEW_EDGES:
            # One copy to the host for all of them, and not waited for now: the target's next pass may have begun.
            if self._leaving is not None:
                left, copy = self._leaving
                self._edges[[*left]] = copy.get()
            self._leaving = self._new_edges, Fetched.of(torch.stack([*self._new_edges.values()]))[0]
            self._new_edges = {}

    def prepend_edge(self, request_id: str, block: int) -> None:
        """Put the last state of a filled block in front of those held, which begin right behind the block."""
        held = self._held[request_id]
        rest = self.rows(request_id, held.start, held.stop)
        states = torch.cat([self._edge(block)[None].to(rest), rest])
        held.start = held.first = held.start - 1
        held.pieces = deque([_Piece([states], 0, len(states))])

    def forget(self, request_id: str) -> None:
        self._held.pop(request_id, None)

    def check(self) -> None:
        for held in self._held.values():
            widths = {sum(column.shape[1] for column in piece.columns) for piece in held.pieces}
            assert widths <= {self.width}, "states of another width"
            assert 0 <= held.first <= held.start <= held.stop, "states at no position"
            assert held.stop == held.first + sum(piece.end - piece.begin for piece in held.pieces), "states are lost"

    def _edge(self, block: int) -> Tensor:
        if (new := self._new_edges.get(block)) is not None:
            return new
        return self._edges[block] if self._leaving is None else self._leaving[0].get(block, self._edges[block])

    def _append(self, request_id: str, start: int, piece: _Piece) -> None:
        held = self._held.get(request_id)
        if held is None or held.stop != start:
            held = self._held[request_id] = _Held(start, start, start)
        # What came before this step is bounded: a step's own states are read in the next one, if anybody reads.
        kept = max(0, self._max_buffered - (piece.end - piece.begin))
        if held.stop - held.start > kept:
            held.drop_before(held.stop - kept)
        held.add(piece)
        if len(held.pieces) > MOST_PIECES and self._device.type != "cpu":
            held.rows(held.start, held.stop)
