"""Batches of rows with recurrent states, for tests of recurrent layers: what each row goes on from, keeps, copies and guesses."""

import random
from dataclasses import dataclass, replace

import paged_batches
import torch
from paged_batches import batch_of
from torch import Tensor

from foretoken.kernels.layout import RaggedBatch, RowStates

BLOCK_SIZE, BLOCKS = 4, 8
SLOTS_OF_A_ROW = 3  # source, target, copy
MOST_GUESSES = 6


@dataclass(frozen=True)
class Row:
    """New tokens behind `start` places, of which the first `known` are no guesses."""

    tokens: list[int]
    start: int
    known: int
    source: int = -1
    target: int = -1
    accepted: int = 0
    parents: list[int] | None = None  # of a tree's guesses
    copy: tuple[int, int] = (0, -1)  # places, slot


def recurrent_batch(rows: list[Row], padding: int = 0, empty_rows: int = 0) -> RaggedBatch:
    """Row r has BLOCKS blocks, or more if it is longer, from r * BLOCKS on. Scores of all tokens. padding: tokens of no row behind them."""
    every = [*rows, *[Row([], 0, 0)] * empty_rows]
    placed: list[paged_batches.Row] = []
    for r, row in enumerate(every):
        causal = len(row.tokens) if row.parents is None else row.known
        count = max(BLOCKS, -(-(row.start + len(row.tokens)) // BLOCK_SIZE))
        blocks = range(r * BLOCKS, r * BLOCKS + count) if r < len(rows) else [0] * BLOCKS
        tree = list(zip(row.tokens[causal:], row.parents or (), strict=True))
        placed.append(paged_batches.Row(row.tokens[:causal], row.start, blocks, tree))
    accepted = [row.accepted - (1 << 64) if row.accepted >> 63 == 1 else row.accepted for row in every]  # guess 63 is the sign
    return replace(
        batch_of(placed, BLOCK_SIZE, padding),
        states=RowStates(
            sources=_narrow([row.source for row in every]), targets=_narrow([row.target for row in every]),
            accepted=torch.tensor(accepted, dtype=torch.int64), num_known=_narrow([row.known for row in every]),
            copy_places=_narrow([row.copy[0] for row in every]), copy_slots=_narrow([row.copy[1] for row in every]),
        ),
    )


def random_rows(seed: int, count: int, vocab_size: int = 97) -> list[Row]:
    """Of every kind: prompts and later chunks, with and without guesses, chains and trees, some accepted before, some copied, some empty.

    Row r has slots SLOTS_OF_A_ROW * r and those behind; accepted guesses are of MOST_GUESSES.
    """
    dice = random.Random(seed)
    rows: list[Row] = []
    for r in range(count):
        slot = SLOTS_OF_A_ROW * r
        if dice.random() < 0.15:
            rows.append(Row([], 5, 0, slot, slot + 1))
            continue
        known, guesses = dice.choice([1, 1, 2, 7]), dice.choice([0, 1, 3, MOST_GUESSES])
        accepted, source, start = 0, -1, 0
        if dice.random() < 0.7:
            accepted, source = dice.randrange(1 << MOST_GUESSES) * dice.choice([0, 1, 1]), slot
            start = accepted.bit_count() + dice.randint(1, 5)
        parents = [dice.randint(max(-1, node - 3), node - 1) for node in range(guesses)] if dice.random() < 0.5 else None
        held = start - accepted.bit_count()
        copied = (dice.randint(held, start + known + 1), slot + 2 if dice.random() < 0.7 else -1)
        target = slot + 1 if dice.random() < 0.85 else -1
        tokens = [dice.randrange(vocab_size) for _ in range(known + guesses)]
        rows.append(Row(tokens, start, known, source, target, accepted, parents, copied))
    return rows


def _narrow(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
