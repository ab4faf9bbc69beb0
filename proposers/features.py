"""Hidden states of the target on their way to a drafter that reads them: what it has not read yet, request by request.

Owns the buffers. Knows no network and not what the states are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Feedback

MAX_BUFFERED = 256
"""States of one request that wait for a drafter that is not asked; older ones are dropped, and it starts anew behind them."""


@dataclass(slots=True)
class _Held:
    start: int  # position of the first row
    states: Tensor  # [n, width]

    @property
    def stop(self) -> int:
        return self.start + self.states.shape[0]  # len() is a Python function of torch's


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
        self._edges = torch.empty(num_blocks, width)  # of each block's last position; memory is taken as it is used
        self._nothing = torch.empty(0, width)  # held where all has been read; on the device where the target leaves its states

    @staticmethod
    def bytes_per_block(width: int) -> int:
        return 4 * width

    def observe(self, feedback: Feedback) -> None:
        """Take in the states of everything that the step committed."""
        if not feedback.hidden:
            return
        columns = [feedback.hidden[boundary] for boundary in self.boundaries]
        if columns[0].device != self._nothing.device:
            self._nothing = self._nothing.to(columns[0].device)
        for i, request_id in enumerate(feedback.request_ids):
            if feedback.finished[i]:
                continue
            begin, known, path = feedback.query_start_loc[i], feedback.num_scheduled[i], feedback.accepted[i]
            if list(path) == list(range(len(path))):
                states = torch.cat([column[begin : begin + known + len(path)] for column in columns], -1)
            else:
                rows = torch.tensor([*range(begin, begin + known), *(begin + known + node for node in path)])
                states = torch.cat([column[rows] for column in columns], -1)
            self._append(request_id, feedback.num_committed[i] - states.shape[0], states.float())

    def span(self, request_id: str) -> tuple[int, int] | None:
        """Positions start:stop whose states are here; None for none."""
        held = self._held.get(request_id)
        return None if held is None else (held.start, held.stop)

    def rows(self, request_id: str, start: int, stop: int) -> Tensor:
        """[stop - start, width] states of positions start:stop; zeros for the position before the text, -1."""
        if start < 0:
            return torch.cat([torch.zeros(-start, self.width, device=self._nothing.device), self.rows(request_id, 0, stop)])
        if start == stop:
            return self._nothing
        held = self._held[request_id]
        assert held.start <= start and stop <= held.stop, "states are asked for that are not here"
        return held.states[start - held.start : stop - held.start]

    def drop_before(self, request_id: str, position: int) -> None:
        """States of earlier positions have been read."""
        held = self._held.get(request_id)
        if held is not None and position > held.start:
            stop = held.stop
            cut = min(position, stop)
            # a view would keep the rest in memory
            held.states = self._nothing if cut == stop else held.states[cut - held.start :].clone()
            held.start = cut

    def keep_edges(self, request_id: str, block_table: Sequence[int]) -> None:
        """Remember, for each block that ends among the states held, its last one."""
        held, size = self._held.get(request_id), self.block_size
        if held is not None:
            for position in range(held.start + -(held.start + 1) % size, held.stop, size):
                self._edges[block_table[position // size]] = held.states[position - held.start]

    def prepend_edge(self, request_id: str, block: int) -> None:
        """Put the last state of a filled block in front of those held, which begin right behind the block."""
        held = self._held[request_id]
        held.states = torch.cat([self._edges[block][None].to(held.states), held.states])
        held.start -= 1

    def forget(self, request_id: str) -> None:
        self._held.pop(request_id, None)

    def check(self) -> None:
        for held in self._held.values():
            assert held.start >= 0 and held.states.shape[1] == self.width, "states at no position, or of another width"

    def _append(self, request_id: str, start: int, states: Tensor) -> None:
        held = self._held.get(request_id)
        if held is None or held.states is self._nothing or held.stop != start:
            self._held[request_id] = _Held(start, states)
            return
        # What came before this step is bounded: a step's own states are read in the next one, if anybody reads.
        surplus = len(held.states) - max(0, self._max_buffered - len(states))
        if surplus > 0:
            held.states = held.states[surplus:]
            held.start += surplus
        held.states = torch.cat([held.states, states])
