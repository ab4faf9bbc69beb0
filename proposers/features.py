"""Hidden states of the target on their way to a drafter that reads them: what it has not read yet, request by request.

Owns the buffers. Knows no network and not what the states are for.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, deque
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
"""... unless it has more than so many times the tokens that were kept: many such steps may be held. What many steps left is shared in the
same way, and who still holds a part is given its own once most of the rest has gone."""

MOST_STEPS = 16
"""Steps that are held as they are on a device, where memory is short. Then what waits is brought together, for all requests at once."""

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


@dataclass(slots=True)
class _Waiting:
    """States of positions start:stop that nobody has asked for yet: rows of the steps they are in, counted through all of these."""

    start: int
    stop: int
    places: list[int] = field(default_factory=list)  # ascending


class Features:
    """The states of `boundaries` side by side, a row for each position, as they become known.

    A step's states wait as they are, and cost next to nothing, until somebody asks for a request's: then it holds its part of them.

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
        self._steps: list[Sequence[Tensor]] = []  # the columns of each
        self._begins = [0]  # of each step's rows, and the end of the last one's
        self._waiting: dict[str, _Waiting] = {}  # of these steps
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
        rows: list[tuple[str, int, Sequence[int]]] = []  # each request's, the position of its first state, and which of the step's they are
        for request_id, committed, begin, known, path, finished in zip(
            feedback.request_ids, feedback.num_committed, feedback.query_start_loc, feedback.num_scheduled, feedback.accepted,
            feedback.finished, strict=False,
        ):
            places = range(begin, begin + known)
            kept = [*places, *[begin + known + node for node in path]] if path else places
            if kept and not finished:
                rows.append((request_id, committed - len(kept), kept))
        if num_tokens > min(WHOLE_STEP * len(feedback.request_ids), MOST_WASTE * num_kept):
            columns, rows = self._cut_out(columns, rows)
        if len(self._steps) >= MOST_STEPS:
            self._bring_together()
        base, waiting = self._begins[-1], self._waiting
        for request_id, start, places in rows:
            one = waiting.get(request_id)
            if one is None or one.stop != start:
                one = waiting[request_id] = _Waiting(start, start)
            one.places += [base + place for place in places]
            one.stop += len(places)
        if rows:
            self._steps.append(columns)
            self._begins.append(base + columns[0].shape[0])

    def span(self, request_id: str) -> tuple[int, int] | None:
        """Positions start:stop whose states are here; None for none."""
        held = self._holding(request_id)
        return None if held is None else (held.start, held.stop)

    def rows(self, request_id: str, start: int, stop: int) -> Tensor:
        """[stop - start, width] states of positions start:stop; zeros for the position before the text, -1."""
        if start < 0:
            return torch.cat([torch.zeros(-start, self.width, device=self._device, dtype=torch.float32), self.rows(request_id, 0, stop)])
        if start == stop:
            return torch.zeros(0, self.width, device=self._device, dtype=torch.float32)
        held = self._holding(request_id)
        assert held is not None and held.start <= start and stop <= held.stop, "states are asked for that are not here"
        return held.rows(start, stop)

    def rows_of_all(self, wanted: Sequence[tuple[str, int, int]]) -> Tensor:
        """[T, width] `rows` of each request, start and stop, one behind the other. With few launches where all lie in one step."""
        places: list[int] = []
        columns: Sequence[Tensor] = ()
        for request_id, start, stop in wanted:
            if start == stop:
                continue
            held = self._holding(request_id)
            if held is None or start < held.start or stop > held.stop or len(held.pieces) != 1:
                break
            piece = held.pieces[0]
            columns = columns or piece.columns
            if columns is not piece.columns:
                break
            begin = piece.begin - held.first
            places += range(begin + start, begin + stop)
        else:
            if len(wanted) > 1 and places:
                begin, end = places[0], places[0] + len(places)
                if places != [*range(begin, end)]:
                    columns, begin, end = self._picked(columns, places), 0, len(places)
                return _Piece(columns, begin, end).cut()
        parts = [self.rows(request_id, start, stop) for request_id, start, stop in wanted]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def drop_before(self, request_id: str, position: int) -> None:
        """States of earlier positions have been read."""
        held = self._holding(request_id)
        if held is not None and position > held.start:
            held.drop_before(min(position, held.stop))

    def keep_edges(self, request_id: str, block_table: Sequence[int]) -> None:
        """Remember, for each block that ends among the states held, its last one."""
        held, size = self._holding(request_id), self.block_size
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
        held = self._holding(request_id)
        assert held is not None, "there is nothing to stand in front of"
        rest = self.rows(request_id, held.start, held.stop)
        states = torch.cat([self._edge(block)[None].to(rest), rest])
        held.start = held.first = held.start - 1
        held.pieces = deque([_Piece([states], 0, len(states))])

    def forget(self, request_id: str) -> None:
        self._held.pop(request_id, None)
        self._waiting.pop(request_id, None)
        self._let_go()

    def check(self) -> None:
        for held in self._held.values():
            widths = {sum(column.shape[1] for column in piece.columns) for piece in held.pieces}
            assert widths <= {self.width}, "states of another width"
            assert 0 <= held.first <= held.start <= held.stop, "states at no position"
            assert held.stop == held.first + sum(piece.end - piece.begin for piece in held.pieces), "states are lost"
        assert bool(self._steps) == bool(self._waiting) and len(self._steps) <= MOST_STEPS, "steps are kept for nobody"
        for one in self._waiting.values():
            assert one.stop - one.start == len(one.places) > 0 and one.places[-1] < self._begins[-1], "states wait that are not there"

    def _edge(self, block: int) -> Tensor:
        if (new := self._new_edges.get(block)) is not None:
            return new
        return self._edges[block] if self._leaving is None else self._leaving[0].get(block, self._edges[block])

    def _holding(self, request_id: str) -> _Held | None:
        """What a request holds, with what waited for it."""
        one = self._waiting.pop(request_id, None)
        if one is None:
            return self._held.get(request_id)
        start, taken = one.start, 0
        while taken < len(one.places):
            step = bisect_right(self._begins, one.places[taken]) - 1
            begin, columns = self._begins[step], self._steps[step]
            end = bisect_left(one.places, self._begins[step + 1], taken)
            places = [place - begin for place in one.places[taken:end]]
            if places[-1] - places[0] == len(places) - 1:
                piece = _Piece(columns, places[0], places[-1] + 1)
            else:
                piece = _Piece(self._picked(columns, places), 0, len(places))
            self._append(request_id, start, piece)
            start, taken = start + len(places), end
        self._let_go()
        held = self._held[request_id]
        if len(held.pieces) > MOST_STEPS and self._device.type != "cpu":
            held.rows(held.start, held.stop)
        return held

    def _append(self, request_id: str, start: int, piece: _Piece) -> None:
        held = self._held.get(request_id)
        if held is None or held.stop != start:
            held = self._held[request_id] = _Held(start, start, start)
        # What came before this step is bounded: a step's own states are read in the next one, if anybody reads.
        kept = max(0, self._max_buffered - (piece.end - piece.begin))
        if held.stop - held.start > kept:
            held.drop_before(held.stop - kept)
        held.add(piece)

    def _bring_together(self) -> None:
        """All that waits into memory of its own, each request's one behind the other: some launches, not some for each request."""
        if self._device.type == "cpu":
            for request_id in [*self._waiting]:
                self._holding(request_id)
            return
        for one in self._waiting.values():
            del one.places[: -self._max_buffered]
        together = [place for one in self._waiting.values() for place in one.places]
        index = upload(torch.tensor(together), self._device)
        columns = [torch.cat(parts)[index] for parts in zip(*self._steps, strict=True)]  # one at a time: memory is short there
        begin = 0
        for request_id, one in self._waiting.items():
            end = begin + len(one.places)
            self._append(request_id, one.stop - len(one.places), _Piece(columns, begin, end))
            begin = end
        self._waiting = {}
        self._let_go()
        self._leave_the_wasteful()

    def _leave_the_wasteful(self) -> None:
        """Who holds a part of what nobody else holds enough of gets its own."""
        num_held: Counter[int] = Counter()
        sizes: dict[int, int] = {}
        for held in self._held.values():
            for piece in held.pieces:
                num_held[id(piece.columns)] += piece.end - piece.begin
                sizes[id(piece.columns)] = piece.columns[0].shape[0]
        wasteful = {shared for shared, size in sizes.items() if MOST_WASTE * num_held[shared] < size}
        for held in self._held.values() if wasteful else ():
            if not wasteful.isdisjoint([id(piece.columns) for piece in held.pieces]):
                held.rows(held.start, held.stop)

    def _cut_out(
        self, columns: Sequence[Tensor], rows: Sequence[tuple[str, int, Sequence[int]]]
    ) -> tuple[Sequence[Tensor], list[tuple[str, int, Sequence[int]]]]:
        """What was kept of a step in memory of its own. Requests with much of it hold theirs at once; the others' lies together."""
        left: list[tuple[str, int, Sequence[int]]] = []
        together: list[int] = []
        for request_id, start, places in rows:
            if len(places) <= WHOLE_STEP:
                left.append((request_id, start, range(len(together), len(together) + len(places))))
                together += places
                continue
            self._holding(request_id)
            is_run = places[-1] - places[0] == len(places) - 1
            own = [column[places[0] : places[-1] + 1].clone() for column in columns] if is_run else self._picked(columns, places)
            self._append(request_id, start, _Piece(own, 0, len(places)))
        return self._picked(columns, together) if left else columns, left

    def _picked(self, columns: Sequence[Tensor], places: Sequence[int]) -> Sequence[Tensor]:
        index = upload(torch.tensor(places), self._device)
        return [column[index] for column in columns]

    def _let_go(self) -> None:
        """Of steps that nobody waits in."""
        if not self._waiting and self._steps:
            self._steps, self._begins = [], [0]
