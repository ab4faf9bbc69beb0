"""A network whose next token is a hash of everything it can see through the cache.

It reads every visible token through the block tables, so a slot that was overwritten, shared by mistake or left over from a
rejected draft changes the output: comparing outputs then tests the whole of the bookkeeping.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.kernels.layout import ChainOutput, Draws, ForwardOutput, KVLayerSpec, KVTensors, RaggedBatch

EMPTY = -1


def next_token(tokens: tuple[int, ...], vocab_size: int) -> int:
    """What the network says after `tokens`."""
    return hash((0, *tokens)) % vocab_size


class HashKV:
    """One (token, position) per slot."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.slots: list[tuple[int, int]] = [(EMPTY, EMPTY)] * (num_blocks * block_size)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        raise NotImplementedError("the hash model writes its slots itself")

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("the hash model reads its slots itself")

    def move(self, src: Tensor, dst: Tensor) -> None:
        for slot, content in zip(dst.tolist(), [self.slots[s] for s in src.tolist()], strict=True):
            self.slots[slot] = content


class HashModel:
    """An Executor in plain Python. `fails_on`: a token that makes any pass that sees it raise.

    `errs`: a poor copy of the others, which says something else after every third text.
    """

    kv_layers = (KVLayerSpec(1, 1, 1),)
    max_model_len = 4096
    is_batch_invariant = True
    weight_bytes = 0

    def __init__(self, vocab_size: int, fails_on: int | None = None, errs: bool = False) -> None:
        self.vocab_size = vocab_size
        self.errs = errs
        self.fails_on = fails_on
        self.num_passes = 0

    def allocate(self, num_blocks: int, block_size: int) -> HashKV:
        return HashKV(num_blocks, block_size)

    def kv_block_bytes(self, block_size: int) -> int:
        return block_size * 16  # a token and a position in each slot

    def run(self, batch: RaggedBatch, kv: KVTensors, hidden: tuple[int, ...] = ()) -> ForwardOutput:
        assert isinstance(kv, HashKV)
        self.num_passes += 1
        tokens, positions, masks = batch.token_ids.tolist(), batch.positions.tolist(), batch.tree_mask.tolist()
        for slot, token, position in zip(batch.slot_mapping.tolist(), tokens, positions, strict=True):
            if token == self.fails_on:
                raise RuntimeError("a token that the network cannot bear")
            if slot >= 0:
                kv.slots[slot] = (token, position)
        starts = batch.query_start_loc.tolist()
        wanted = batch.logits_indices.tolist()
        said: list[int] = []
        row = 0
        for flat in wanted:
            while starts[row + 1] <= flat:
                row += 1
            seen = self._visible(batch, kv, row, flat - starts[row], masks[starts[row] : starts[row + 1]])
            token = next_token(seen, self.vocab_size)
            said.append((token + 1) % self.vocab_size if self.errs and hash(seen) % 3 == 0 else token)
        argmax = torch.tensor(said, dtype=torch.int64)
        logits = None
        if len(batch.full_logits):
            chosen = argmax[batch.full_logits]
            logits = torch.stack([self._logits(int(token)) for token in chosen])
        return ForwardOutput(argmax, torch.ones(len(said)), logits)

    def run_chain(self, batch: RaggedBatch, kv: KVTensors, counts: Tensor, draws: Draws | None = None) -> ChainOutput:
        from foretoken.kernels.chain import run_chain_by_steps

        return run_chain_by_steps(self, batch, kv, counts, draws)

    def _logits(self, token: int) -> Tensor:
        """A few likely tokens, a function of the best one alone."""
        ids = torch.arange(self.vocab_size)
        return torch.where(ids == token, 4.0, ((ids * 7 + token * 13) % self.vocab_size).float() / self.vocab_size * 3.0)

    def _visible(self, batch: RaggedBatch, kv: HashKV, row: int, index: int, masks: list[int]) -> tuple[int, ...]:
        num_causal, new = int(batch.num_causal[row]), len(masks)
        first = int(batch.seq_lens[row]) - new
        table, size = batch.block_tables[row].tolist(), batch.block_size
        if index < num_causal:
            places = range(first + index + 1)
            tail: list[int] = []
        else:
            places = range(first + num_causal)
            mask = masks[index] & (2**64 - 1)
            tail = [first + num_causal + bit for bit in range(new - num_causal) if mask >> bit & 1]
        seen: list[int] = []
        for expected, place in enumerate([*places, *tail]):
            token, position = kv.slots[table[place // size] * size + place % size]
            assert position == expected, f"place {place} holds position {position}, not {expected}"
            seen.append(token)
        return tuple(seen)
