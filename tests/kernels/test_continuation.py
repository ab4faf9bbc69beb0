"""The batch that a device makes for itself is the one that the host would make if it knew what the target has said."""

from __future__ import annotations

import random

import pytest
import torch

from foretoken.kernels.batch_lists import BatchLists
from foretoken.kernels.continuation import Continuation, continued

BLOCK_SIZE, VOCAB, MAX_LEN = 4, 50, 100


def a_row(rng: random.Random, answer: int, first_block: int) -> Continuation:
    length, num_drafted = rng.randint(1, 30), rng.randint(0, 5)
    num_blocks = -(-(length + num_drafted + 1) // BLOCK_SIZE) + rng.randint(0, 2)
    table = rng.sample(range(first_block, first_block + 12), num_blocks) if num_blocks <= 12 else list(range(num_blocks))
    held = rng.choice([0, max(num_drafted - 1, 0), num_drafted])
    return Continuation(answer, length, num_drafted, held, rng.randint(0, 9), tuple(table), rng.choice([0, 0, 1]), rng.randint(1, 6))


def what_the_host_would_make(rows: list[Continuation], emitted: list[list[int]]) -> BatchLists:
    lists = BatchLists(BLOCK_SIZE)
    for row in rows:
        tokens = emitted[row.answer]
        start, stop = row.read(len(tokens) - 1)
        assert stop == row.length + len(tokens) and stop - start <= row.most_read
        lists.token_ids += tokens[start - row.length :]
        lists.positions += range(start, stop)
        lists.add_slots(row.table, start, stop)
        lists.query_start_loc.append(len(lists.token_ids))
        lists.seq_lens.append(stop)
        lists.num_causal.append(stop - start)
        lists.logits_indices.append(len(lists.token_ids) - 1)
        lists.tables.append(row.table)
        lists.first_places.append(row.first)
    lists.tree_mask += [0] * len(lists.token_ids)
    return lists


@pytest.mark.parametrize("seed", range(60))
def test_it_is_the_batch_of_what_was_said(seed: int) -> None:
    rng = random.Random(seed)
    num_answers = rng.randint(1, 6)
    asked = rng.sample(range(num_answers), rng.randint(1, num_answers))  # some go on, in any order
    rows = [a_row(rng, answer, 12 * i) for i, answer in enumerate(asked)]
    drafted = {row.answer: row.num_drafted for row in rows}
    emitted = [[rng.randrange(VOCAB) for _ in range(1 + rng.randint(0, drafted.get(i, 3)))] for i in range(num_answers)]
    depth = max(map(len, emitted)) + rng.randint(0, 2)
    answer = torch.tensor([[len(said), *said, *[77] * (2 * depth - len(said))] for said in emitted], dtype=torch.int32)

    found = continued(rows, answer, BLOCK_SIZE, VOCAB, MAX_LEN)
    expected = what_the_host_would_make(rows, emitted).batch()
    batch, count = found.batch, len(expected.token_ids)
    assert len(batch.token_ids) == sum(row.most_read for row in rows) >= count
    for name in ("token_ids", "positions", "slot_mapping", "tree_mask"):
        assert torch.equal(getattr(batch, name)[:count], getattr(expected, name)), name
    assert (batch.slot_mapping[count:] == -1).all() and (batch.positions >= 0).all()
    for name in ("query_start_loc", "seq_lens", "num_causal", "logits_indices"):
        assert torch.equal(getattr(batch, name), getattr(expected, name)), name
        assert getattr(batch, name).dtype == getattr(expected, name).dtype
    assert torch.equal(batch.block_tables, expected.block_tables) and batch.block_tables.dtype == torch.int32
    firsts = torch.zeros(len(rows)).int() if expected.first_places is None else expected.first_places
    assert torch.equal(torch.zeros(len(rows)).int() if batch.first_places is None else batch.first_places, firsts)
    # Entries are made of the states behind which their tokens were chosen: the root's, then each accepted guess's.
    nodes = [row.node + i for row in rows for i in range(*(place - row.length for place in row.read(len(emitted[row.answer]) - 1)))]
    assert found.nodes[:count].tolist() == nodes
    assert found.num_accepted.tolist() == [len(emitted[row.answer]) - 1 for row in rows]
    assert [said[1 : 1 + said[0]] for said in found.said.tolist()] == [emitted[row.answer] for row in rows]
    rooms = [row.room(len(emitted[row.answer]) - 1, BLOCK_SIZE, MAX_LEN) for row in rows]
    assert found.counts.tolist() == rooms and min(rooms) >= 1


def test_what_cannot_be_read_is_read_as_something_that_can() -> None:
    """A row that failed, and a token that the drafter has no embedding for: nobody uses what follows, but nothing breaks either."""
    rows = [Continuation(0, 5, 2, 1, 0, (1, 2, 3), 0, 3), Continuation(1, 7, 0, 0, 3, (4, 5), 0, 2)]
    answer = torch.tensor([[0, -1, 0, 0, 0, 0, 0], [1, 60, 0, 0, 0, 0, 0]], dtype=torch.int32)
    found = continued(rows, answer, BLOCK_SIZE, VOCAB, MAX_LEN)
    assert found.batch.token_ids.tolist()[:2] == [0, VOCAB - 1] and found.num_accepted.tolist() == [0, 0]
    assert found.batch.seq_lens.tolist() == [6, 8] and found.batch.slot_mapping.tolist() == [2 * 4 + 1, 5 * 4 + 3, -1]


def test_chains_end_where_places_and_positions_do() -> None:
    row = Continuation(0, 5, 2, 2, 0, (1, 2, 3), 0, 9)
    answer = torch.tensor([[3, 1, 2, 3, 0, 1, 2]], dtype=torch.int32)
    assert continued([row], answer, BLOCK_SIZE, VOCAB, MAX_LEN).counts.tolist() == [5] == [row.room(2, BLOCK_SIZE, MAX_LEN)]
    assert continued([row], answer, BLOCK_SIZE, VOCAB, 10).counts.tolist() == [2] == [row.room(2, BLOCK_SIZE, 10)]
