"""Rows of recurrent networks from pass to pass, with guesses, copies and ways back: what is right about them is known beforehand."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import transformers
from paged_batches import BLOCK_SIZE, Row, batch_of

from foretoken.kernels.decoder import decoder_program
from foretoken.kernels.fuse import fuse
from foretoken.kernels.layout import Executor, KVTensors, RaggedBatch, RowStates, StateRoom
from foretoken.kernels.program import Program

VOCAB = 97
_TWO = [random.Random(i).choices(range(VOCAB), k=16) for i in range(2)]


def qwen3_5_program(k_dim: int = 24, v_dim: int = 40, heads: tuple[int, int] = (2, 4), layers: int = 4) -> Program:
    """A small Qwen3.5: its last layer of four attends. heads: key and value heads of the others."""
    config = transformers.Qwen3_5TextConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, linear_key_head_dim=k_dim, linear_value_head_dim=v_dim, linear_num_key_heads=heads[0], linear_num_value_heads=heads[1],
        max_position_embeddings=512,
    )
    return fuse(decoder_program(config))


@dataclass(frozen=True)
class StateRow:
    """known tokens are the sequence's, behind `start` places; then guesses: (token, parent among them), -1 = the last known token.

    Guesses in a chain count as causal tokens. accepted: numbers of the guesses kept in the source. copy: (places, slot), slot -1 = none.
    """

    known: list[int]
    start: int
    blocks: list[int]
    source: int
    target: int
    accepted: Sequence[int] = ()
    guesses: Sequence[tuple[int, int]] = ()
    is_chain: bool = False
    copy: tuple[int, int] = (0, -1)


def state_batch(rows: list[StateRow]) -> RaggedBatch:
    """One pass over all rows, with whole logits of all tokens."""
    plain = [
        Row(row.known + [token for token, _ in row.guesses], row.start, row.blocks)
        if row.is_chain
        else Row(row.known, row.start, row.blocks, list(row.guesses))
        for row in rows
    ]

    def column(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    masks = [sum(1 << guess for guess in row.accepted) for row in rows]
    states = RowStates(
        sources=column([row.source for row in rows]),
        targets=column([row.target for row in rows]),
        accepted=column([mask - (1 << 64) if mask >> 63 else mask for mask in masks], torch.int64),  # guess 63 is the sign
        num_known=column([len(row.known) for row in rows]),
        copy_places=column([row.copy[0] for row in rows]),
        copy_slots=column([row.copy[1] for row in rows]),
    )
    return replace(batch_of(plain), states=states)


@dataclass(frozen=True)
class StatePass:
    """right: (flat index, text, place) of each token that is the text's own. moves: slots of the cache, after the pass."""

    batch: RaggedBatch
    right: list[tuple[int, int, int]]
    moves: tuple[torch.Tensor, torch.Tensor]


@dataclass
class _Sequence:
    text: list[int]
    blocks: list[int]
    slots: list[int]  # two for the state by turns, one for a copy
    done: int = 0  # places
    has_state: bool = False
    accepted: tuple[int, ...] = ()
    copied: int = 0  # places that the copy holds

    def next_row(self, rng: random.Random, longest: int, most_guesses: int) -> tuple[StateRow, list[int]]:
        """And which of its guesses are the text's next tokens, in order."""
        known = self.text[self.done : self.done + rng.randint(1, longest)]
        behind = self.done + len(known)
        guesses, branch = _guesses(rng, self.text[behind:], rng.choice([0, 1, 3, most_guesses]))
        is_chain = all(parent == i - 1 for i, (_, parent) in enumerate(guesses)) and rng.random() < 0.7
        copy = (0, -1)
        if rng.random() < 0.3:  # in the midst of what is computed anew, or of the known tokens, or nowhere
            copy = rng.randint(self.done - len(self.accepted), behind + 1), self.slots[2]
            if copy[0] in range(self.done - len(self.accepted) + 1, behind + 1):
                self.copied = copy[0]
        source = self.slots[0] if self.has_state else -1
        return StateRow(known, self.done, self.blocks, source, self.slots[1], self.accepted, guesses, is_chain, copy), branch

    def go_on(self, row: StateRow, branch: list[int], num_accepted: int) -> None:
        self.done += len(row.known) + num_accepted
        self.accepted = tuple(branch[:num_accepted])
        self.slots[:2] = self.slots[1::-1]
        self.has_state = True

    def go_back(self) -> None:
        """To where the copy was made, with the copy for its state."""
        self.slots = [self.slots[2], self.slots[1], self.slots[0]]
        self.done, self.accepted, self.copied = self.copied, (), 0


def lives(texts: list[list[int]], rng: random.Random, num_blocks: int, most_guesses: int = 8, longest: int = 20) -> Iterator[StatePass]:
    """All texts to their ends, together, in random pieces and slots, with random guesses of which random ones are accepted.

    Slots of states: three for each text.
    """
    order, slots = rng.sample(range(num_blocks), num_blocks), rng.sample(range(3 * len(texts)), 3 * len(texts))
    width = (max(map(len, texts)) + most_guesses) // BLOCK_SIZE + 1
    sequences = [_Sequence(text, order[i * width : (i + 1) * width], slots[3 * i : 3 * i + 3]) for i, text in enumerate(texts)]
    ways_back = 4 * len(texts)
    while live := [(i, sequence) for i, sequence in enumerate(sequences) if sequence.done < len(sequence.text)]:
        live = rng.sample(live, rng.randint(1, len(live)))
        rows = [sequence.next_row(rng, longest, most_guesses) for _, sequence in live]
        batch = state_batch([row for row, _ in rows])
        right: list[tuple[int, int, int]] = []
        src: list[int] = []
        dst: list[int] = []
        for (i, sequence), (row, branch), first in zip(live, rows, batch.query_start_loc.tolist(), strict=False):
            behind = row.start + len(row.known)
            right += [(first + at, i, row.start + at) for at in range(len(row.known))]
            right += [(first + len(row.known) + node, i, behind + at) for at, node in enumerate(branch)]
            num_accepted = rng.randint(0, len(branch))
            for at, node in enumerate(branch[:num_accepted]):
                src.append(_slot(row.blocks, behind + node))
                dst.append(_slot(row.blocks, behind + at))
            sequence.go_on(row, branch, num_accepted)
            if sequence.copied and ways_back and rng.random() < 0.3:
                sequence.go_back()
                ways_back -= 1
        yield StatePass(batch, right, (torch.tensor(src, dtype=torch.int64), torch.tensor(dst, dtype=torch.int64)))


def small_cache(executor: Executor) -> KVTensors:
    """For `two_lives`."""
    return executor.allocate(4, BLOCK_SIZE, StateRoom(6, 5))


def scores_of_two(network: Executor) -> torch.Tensor:
    """[2, 16, VOCAB] of the texts of `two_lives`, in one pass without guesses."""
    rows = [StateRow(text, 0, [2 * i, 2 * i + 1], -1, -1) for i, text in enumerate(_TWO)]
    logits = network.run(state_batch(rows), small_cache(network)).logits
    assert logits is not None
    return logits.cpu().view(2, 16, VOCAB)


def two_lives(
    run: Callable[[RaggedBatch], torch.Tensor], kv: KVTensors, expected: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of each pass the scores [n, VOCAB] of the tokens that are the text's own, and those that they have in `scores_of_two`."""
    for state_pass in lives(_TWO, random.Random(3), 4, most_guesses=5, longest=5):
        flat, texts, places = (list(column) for column in zip(*state_pass.right, strict=True))
        yield run(state_pass.batch)[flat].cpu(), expected[texts, places]
        kv.move(*state_pass.moves)


def _guesses(rng: random.Random, following: list[int], most: int) -> tuple[list[tuple[int, int]], list[int]]:
    guesses: list[tuple[int, int]] = []
    branch: list[int] = []
    is_chain = rng.random() < 0.4
    for i in range(rng.randint(0, most)):
        tip = branch[-1] if branch else -1
        if len(branch) < len(following) and (tip == i - 1 or not is_chain) and rng.random() < 0.6:
            guesses.append((following[len(branch)], tip))
            branch.append(i)
        else:
            guesses.append((rng.randrange(VOCAB), i - 1 if is_chain else rng.randint(max(-1, i - 6), i - 1)))
    return guesses, branch


def _slot(blocks: list[int], place: int) -> int:
    return blocks[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
