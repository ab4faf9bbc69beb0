"""Batches over one growing cache, for tests of anything that runs a decoder."""

from dataclasses import dataclass, field, replace

import torch
from paged_batches import Row, batch_of
from torch import Tensor

from foretoken.kernels.device_chain import ChainTensors
from foretoken.kernels.layout import ChainOutput, Executor, ForwardOutput, KVTensors, RaggedBatch, RowStates, StateRoom

BLOCK_SIZE = 4


def ragged(rows: list[tuple[list[int], int, list[int]]], all_logits: bool = True) -> RaggedBatch:
    """rows: (new token ids, tokens already in the cache, block ids). Causal tokens only; logits of all or of last tokens."""
    batch = batch_of([Row(new, start, blocks) for new, start, blocks in rows], BLOCK_SIZE)
    if all_logits:
        return batch
    return replace(batch, logits_indices=batch.query_start_loc[1:].long() - 1, full_logits=torch.arange(len(rows)))


@dataclass
class Decoding:
    """Rows of one executor; row r owns every num_rows-th block, so that no row's blocks are contiguous.

    A recurrent network's states have two slots a row, of which each pass reads one and writes the other.
    """

    executor: Executor
    num_rows: int = 1
    max_len: int = 64
    kv: KVTensors = field(init=False)
    lengths: list[int] = field(init=False)

    def __post_init__(self) -> None:
        blocks = -(-self.max_len // BLOCK_SIZE)
        room = StateRoom(2 * self.num_rows, 0) if self.executor.state_layers else None
        self.kv = self.executor.allocate(self.num_rows * blocks, BLOCK_SIZE, room)
        self.lengths = [0] * self.num_rows
        self._states = [-1] * self.num_rows  # slot of each

    def batch(self, tokens: list[list[int]], all_logits: bool = True) -> RaggedBatch:
        blocks = range(-(-self.max_len // BLOCK_SIZE))
        batch = ragged([(new, self.lengths[r], [b * self.num_rows + r for b in blocks]) for r, new in enumerate(tokens)], all_logits)
        if not self.executor.state_layers:
            return batch
        sources, targets = torch.tensor(self._states, dtype=torch.int32), torch.tensor(self._next_states(), dtype=torch.int32)
        none = torch.full_like(sources, -1)
        states = RowStates(sources, targets, torch.zeros(self.num_rows, dtype=torch.int64), batch.num_causal, none, none)
        return replace(batch, states=states)

    def _next_states(self) -> list[int]:
        return [2 * r + (state == 2 * r) for r, state in enumerate(self._states)]

    def feed(self, tokens: list[list[int]], hidden: tuple[int, ...] = ()) -> ForwardOutput:
        """One pass over some new tokens of each row, with logits of all of them."""
        output = self.executor.run(self.batch(tokens), self.kv, hidden)
        self.lengths = [length + len(new) for length, new in zip(self.lengths, tokens, strict=True)]
        self._states = [after if new else now for now, after, new in zip(self._states, self._next_states(), tokens, strict=True)]
        return output


def assert_same_chains(found: ChainOutput | ChainTensors, expected: ChainOutput, counts: Tensor) -> None:
    for chain, count in enumerate(counts.tolist()):
        assert found.token_ids[chain, :count].tolist() == expected.token_ids[chain, :count].tolist()
        torch.testing.assert_close(found.confidence[chain, :count], expected.confidence[chain, :count])
        if expected.logits is not None:
            assert isinstance(found.logits, Tensor)
            torch.testing.assert_close(found.logits[chain, :count], expected.logits[chain, :count])
