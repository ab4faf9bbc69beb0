"""Rows that the next pass feeds again behind a step: any lengths, drafts, tables and ends."""

import random
from array import array

import torch
from continuing import BLOCK_SIZE, VOCAB, Step
from torch import Tensor

from foretoken.kernels.batch_lists import BatchLists
from foretoken.kernels.following import Follower, Followers
from foretoken.kernels.layout import RaggedBatch

MOST = 7
"""Guesses of one row."""


def random_followers(seed: int, most_rows: int = 6) -> tuple[Step, list[Follower], Tensor]:
    """A step, rows of it that go on in any order, and guesses for them."""
    step, rng = Step.random(seed, most_rows), random.Random(seed)
    chains = rng.sample(range(len(step.rows)), len(step.rows))
    rows: list[Follower] = []
    for i, (row, chain) in enumerate(zip(step.rows, chains, strict=True)):
        count = rng.choice([0, 1, 3, MOST])
        blocks = -(-(row.length + row.num_drafted + 1 + count) // BLOCK_SIZE) + rng.randint(0, 2)
        table = array("i", rng.sample(range(20 * i, 20 * i + 20), blocks))
        rows.append(Follower(row.answer, row.length, chain, count, table, rng.random() < 0.5))
    guesses = torch.tensor([[rng.randrange(VOCAB) for _ in range(MOST)] for _ in rows])
    return step, rows, guesses


def followers(rows: list[Follower], device: str = "cpu") -> Followers:
    return Followers.of(rows, torch.device(device), BLOCK_SIZE, VOCAB)


def what_the_host_would_make(rows: list[Follower], emitted: list[list[int]], guesses: Tensor) -> RaggedBatch:
    lists = BatchLists(BLOCK_SIZE)
    for row in rows:
        said = emitted[row.answer]
        start = row.length + len(said) - 1
        stop = start + 1 + row.count
        first = len(lists.token_ids)
        lists.token_ids += [said[-1], *guesses[row.chain, : row.count].tolist()]
        lists.positions += range(start, stop)
        lists.add_slots(row.table, start, stop)
        lists.logits_indices += range(first, len(lists.token_ids))
        if row.draws:
            lists.full_logits += range(first, len(lists.token_ids))
        lists.query_start_loc.append(len(lists.token_ids))
        lists.seq_lens.append(stop)
        lists.num_causal.append(1 + row.count)
        lists.tables.append(row.table)
    lists.tree_mask += [0] * len(lists.token_ids)
    return lists.batch()
