"""A drafter's network that reads the hash model's states, and notices any state or entry that is not what it should be.

The entry of position p is (token p, state before it). Since a state is made of the one before and a token, entries prove each
other: a state that was paired with the wrong token, dropped, or left over from a rejected guess does not fit its neighbours.
"""

from collections.abc import Mapping

import torch
from hash_model import from_row, likely, mix, to_row, visible_slots
from plain_executor import PlainExecutor, PlainKV
from torch import Tensor

from foretoken.kernels.layout import ForwardOutput, KVTensors, RaggedBatch, StateRoom
from foretoken.proposers.config import Tree
from foretoken.proposers.drafting import OwnCache, Pairing
from foretoken.proposers.features import Features
from foretoken.proposers.guessing import FEATURE, ChainGuesser, Drawing, Network
from foretoken.proposers.learned import LearnedProposer
from foretoken.proposers.tree_guessing import TreeGuesser

Entry = tuple[int, int, int]
"""Token, position, state before the token."""


class HeadKV(PlainKV[Entry | None]):
    def move(self, src: Tensor, dst: Tensor) -> None:
        raise NotImplementedError("drafters' entries are never moved")


class HashHead(PlainExecutor):
    """An `Executor`: knows what the target says, if all that it reads is right. Counts guesses of rows that began late."""

    recurrent: tuple[str, int] | None = (FEATURE, 0)

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.num_restarted = 0

    def allocate(self, num_blocks: int, block_size: int, states: StateRoom | None = None) -> HeadKV:
        return HeadKV(num_blocks, block_size, None)

    def kv_block_bytes(self, block_size: int) -> int:
        return block_size * 24

    def run(
        self, batch: RaggedBatch, kv: KVTensors, hidden: tuple[int, ...] = (), inputs: Mapping[str, Tensor] | None = None
    ) -> ForwardOutput:
        assert isinstance(kv, HeadKV) and inputs is not None
        tokens, positions, slots = batch.token_ids.tolist(), batch.positions.tolist(), batch.slot_mapping.tolist()
        given = [from_row(row) for row in inputs[FEATURE].tolist()]
        assert len(given) == len(tokens), "not one state a token"
        for slot, entry in zip(slots, zip(tokens, positions, given, strict=True), strict=True):
            kv.slots[slot] = entry
        after: list[int] = []
        starts = batch.query_start_loc.tolist()
        for row in range(len(starts) - 1):
            self.num_restarted += batch.first_places is not None and int(batch.first_places[row]) > 1
            for index in range(starts[row + 1] - starts[row]):
                after.append(self._state(batch, kv, row, index))
        said = torch.tensor([after[flat] % self.vocab_size for flat in batch.logits_indices.tolist()], dtype=torch.int64)
        logits = torch.stack([likely(int(t), self.vocab_size) for t in said[batch.full_logits]]) if len(batch.full_logits) else None
        states = torch.tensor([to_row(state) for state in after])
        return ForwardOutput(said, torch.ones(len(said)), logits, dict.fromkeys(hidden, states))

    def _state(self, batch: RaggedBatch, kv: HeadKV, row: int, index: int) -> int:
        """The state behind a token, after a look at all entries that it sees."""
        entries = [kv.slots[slot] for slot in visible_slots(batch, row, index)]
        before: Entry | None = None
        for entry in entries:
            assert entry is not None, "an entry that was never written is seen"
            if before is not None:
                assert entry[1] == before[1] + 1, f"position {entry[1]} follows {before[1]}"
                assert entry[2] == mix(before[2], before[0]), f"the state of position {entry[1]} does not follow from the one before"
            before = entry
        assert before is not None
        return mix(before[2], before[0])


def feature_drafter(
    name: str,
    network: HashHead,
    num_blocks: int,
    block_size: int,
    max_tokens: int,
    max_model_len: int = 4096,
    tree: Tree | None = None,
) -> LearnedProposer:
    """EAGLE's pairing around the hash head: the entry of position p is made of token p and the state of p - 1."""
    features = Features((0,), 3, num_blocks, block_size, max_buffered=8)
    cache = OwnCache(max_model_len, max_tokens, network.vocab_size, Pairing(shift=1, first=1), features)
    wired = Network(network, network.allocate(num_blocks, block_size), encode=lambda states: states)
    drawing = Drawing(network.vocab_size)
    guesser = ChainGuesser(wired, drawing) if tree is None else TreeGuesser(wired, drawing, tree)
    return LearnedProposer(name, network.kv_layers, cache, guesser)
