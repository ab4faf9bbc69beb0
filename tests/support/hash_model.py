"""A network whose next token is a hash of everything it can see through the cache.

It reads every visible token through the block tables, so a slot that was overwritten, shared by mistake or left over from a
rejected draft changes the output: comparing outputs then tests the whole of the bookkeeping.
"""

import functools
import random
from collections.abc import Mapping

import torch
from plain_executor import PlainExecutor, PlainKV
from torch import Tensor

from foretoken.kernels.layout import ForwardOutput, KVTensors, RaggedBatch, StateLayerSpec, StateRoom

EMPTY = -1


def mix(state: int, token: int) -> int:
    """The state behind one more token."""
    return hash((state, token)) & (2**48 - 1)


def next_token(tokens: tuple[int, ...], vocab_size: int) -> int:
    """What the network says after `tokens`."""
    return functools.reduce(mix, tokens, 0) % vocab_size


def to_row(state: int) -> list[float]:
    """A state as three numbers that float32 holds exactly."""
    return [float(state >> shift & 0xFFFF) for shift in (0, 16, 32)]


def from_row(row: list[float]) -> int:
    return sum(int(part) << shift for part, shift in zip(row, (0, 16, 32), strict=True))


def visible_slots(batch: RaggedBatch, row: int, index: int) -> list[int]:
    """Slots that the row's token `index` sees, its own included, in the order of their positions."""
    starts = batch.query_start_loc
    num_causal, new = int(batch.num_causal[row]), int(starts[row + 1] - starts[row])
    first = int(batch.seq_lens[row]) - new
    table, size = batch.block_tables[row].tolist(), batch.block_size
    lowest = 0 if batch.first_places is None else int(batch.first_places[row])
    if index < num_causal:
        places = [*range(lowest, first + index + 1)]
    else:
        mask = int(batch.tree_mask[int(starts[row]) + index]) & (2**64 - 1)
        tail = [first + num_causal + bit for bit in range(new - num_causal) if mask >> bit & 1]
        places = [*range(lowest, first + num_causal), *tail]
    return [table[place // size] * size + place % size for place in places]


class HashKV(PlainKV[tuple[int, int]]):
    """One (token, position) per slot; of recurrent models also states, which are the tokens so far, and guesses beside them."""

    def __init__(self, num_blocks: int, block_size: int, states: StateRoom | None = None) -> None:
        super().__init__(num_blocks, block_size, (EMPTY, EMPTY))
        self.num_guesses = 0 if states is None else states.num_guesses
        self.states: list[tuple[int, ...] | None] = [None] * (0 if states is None else states.num_slots)
        self.guesses: list[list[int]] = [[] for _ in self.states]


class HashModel(PlainExecutor):
    """An Executor in plain Python. `fails_on`: a token that makes any pass that sees it raise.

    `errs`: a poor copy of the others, which says something else after every third text.
    """

    def __init__(self, vocab_size: int, fails_on: int | None = None, errs: bool = False) -> None:
        self.vocab_size = vocab_size
        self.errs = errs
        self.fails_on = fails_on
        self.num_passes = 0

    def allocate(self, num_blocks: int, block_size: int, states: StateRoom | None = None) -> HashKV:
        return HashKV(num_blocks, block_size, states)

    def kv_block_bytes(self, block_size: int) -> int:
        return block_size * 16  # a token and a position in each slot

    def run(
        self, batch: RaggedBatch, kv: KVTensors, hidden: tuple[int, ...] = (), inputs: Mapping[str, Tensor] | None = None
    ) -> ForwardOutput:
        assert isinstance(kv, HashKV) and not inputs
        self.num_passes += 1
        tokens, positions = batch.token_ids.tolist(), batch.positions.tolist()
        for slot, token, position in zip(batch.slot_mapping.tolist(), tokens, positions, strict=True):
            if token == self.fails_on:
                raise RuntimeError("a token that the network cannot bear")
            if slot >= 0:
                kv.slots[slot] = (token, position)
        seen = {flat: self._visible(batch, kv, flat) for flat in (range(len(tokens)) if hidden else batch.logits_indices.tolist())}
        said: list[int] = []
        for flat in batch.logits_indices.tolist():
            token = next_token(seen[flat], self.vocab_size)
            said.append((token + 1) % self.vocab_size if self.errs and hash(seen[flat]) % 3 == 0 else token)
        argmax = torch.tensor(said, dtype=torch.int64)
        logits = None
        if len(batch.full_logits):
            logits = torch.stack([likely(int(token), self.vocab_size) for token in argmax[batch.full_logits]])
        states = torch.tensor([to_row(functools.reduce(mix, seen[flat], 0)) for flat in range(len(tokens))]) if hidden else None
        return ForwardOutput(argmax, torch.ones(len(said)), logits, {} if states is None else dict.fromkeys(hidden, states))

    def _visible(self, batch: RaggedBatch, kv: HashKV, flat: int) -> tuple[int, ...]:
        row = int(torch.searchsorted(batch.query_start_loc, flat, right=True)) - 1
        seen: list[int] = []
        for expected, slot in enumerate(visible_slots(batch, row, flat - int(batch.query_start_loc[row]))):
            token, position = kv.slots[slot]
            assert position == expected, f"slot {slot} holds position {position}, not {expected}"
            seen.append(token)
        return tuple(seen)


class RecurrentHashModel(HashModel):
    """A model that says the same, and breaks if a row's recurrent state is not what its tokens so far make of it.

    dice: now and then a pass with guesses breaks when all is written, so that it has to be run again.
    """

    state_layers = (StateLayerSpec(1, 1),)

    def __init__(self, vocab_size: int, dice: random.Random, fails_on: int | None = None) -> None:
        super().__init__(vocab_size, fails_on)
        self._dice = dice

    def run(
        self, batch: RaggedBatch, kv: KVTensors, hidden: tuple[int, ...] = (), inputs: Mapping[str, Tensor] | None = None
    ) -> ForwardOutput:
        output = super().run(batch, kv, hidden, inputs)
        assert isinstance(kv, HashKV) and batch.states is not None
        states, written = batch.states, []
        for row in range(len(batch.seq_lens)):
            start, end = (int(batch.query_start_loc[row + i]) for i in (0, 1))
            known = start + int(states.num_known[row])
            source, target = int(states.sources[row]), int(states.targets[row])
            held: tuple[int, ...] = ()
            if source >= 0:
                assert (state := kv.states[source]) is not None, "a state that nobody has written"
                held = state
            bits = int(states.accepted[row]) & (2**64 - 1)
            again = [guess for i, guess in enumerate(kv.guesses[source]) if bits >> i & 1] if source >= 0 else []
            sure = (*held, *again, *batch.token_ids[start:known].tolist())
            assert sure == self._visible(batch, kv, known - 1), "a row goes on from another's state"
            guesses = batch.token_ids[known:end].tolist()
            assert len(guesses) <= kv.num_guesses and target >= 0
            written.append((target, sure, guesses))
            if (copied := int(states.copy_slots[row])) >= 0:
                place = int(states.copy_places[row])
                assert len(held) < place <= len(sure), "a copy of a state that the row does not come past"
                written.append((copied, sure[:place], []))
        slots = [slot for slot, _, _ in written]
        assert len({*slots}) == len(slots) and not {*slots} & {*states.sources.tolist()}, "a state that is read is written"
        for slot, state, guesses in written:
            kv.states[slot], kv.guesses[slot] = state, guesses
        if len(batch.token_ids) > int(states.num_known.sum()) and self._dice.random() < 0.05:
            raise RuntimeError("the network breaks when all is written")
        return output


def likely(token: int, vocab_size: int) -> Tensor:
    """[vocab_size] logits: a few likely tokens, a function of the best one alone."""
    ids = torch.arange(vocab_size)
    return torch.where(ids == token, 4.0, ((ids * 7 + token * 13) % vocab_size).float() / vocab_size * 3.0)
