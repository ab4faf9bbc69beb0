"""The batch that a device makes for itself is the one that the host would make if it knew what the target has said."""

from array import array

import pytest
import torch
from continuing import BLOCK_SIZE, MAX_LEN, VOCAB, Step, ways

from foretoken.kernels.batch_lists import BatchLists
from foretoken.kernels.continuation import Continuation, continued


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
    step = Step.random(seed)
    rows, emitted = step.rows, step.emitted
    found = continued(ways(rows), step.answer)
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
    rows = [Continuation(0, 5, 2, 1, 0, array("i", (1, 2, 3)), 0, 3), Continuation(1, 7, 0, 0, 3, array("i", (4, 5)), 0, 2)]
    answer = torch.tensor([[0, -1, 0, 0, 0, 0, 0], [1, 60, 0, 0, 0, 0, 0]], dtype=torch.int32)
    found = continued(ways(rows), answer)
    assert found.batch.token_ids.tolist()[:2] == [0, VOCAB - 1] and found.num_accepted.tolist() == [0, 0]
    assert found.batch.seq_lens.tolist() == [6, 8] and found.batch.slot_mapping.tolist() == [2 * 4 + 1, 5 * 4 + 3, -1]


def test_chains_end_where_places_and_positions_do() -> None:
    row = Continuation(0, 5, 2, 2, 0, array("i", (1, 2, 3)), 0, 9)
    answer = torch.tensor([[3, 1, 2, 3, 0, 1, 2]], dtype=torch.int32)
    assert continued(ways([row]), answer).counts.tolist() == [5] == [row.room(2, BLOCK_SIZE, MAX_LEN)]
    assert continued(ways([row], max_model_len=10), answer).counts.tolist() == [2] == [row.room(2, BLOCK_SIZE, 10)]
