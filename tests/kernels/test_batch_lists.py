"""Batches from lists: what is asked for stands in the arrays, and memory that is used again holds nothing of the batch before."""

import random

import torch

from foretoken.kernels.batch_lists import TABLE_STEP, BatchLists, BatchMemory
from foretoken.kernels.layout import RaggedBatch


def some_lists(chance: random.Random) -> BatchLists:
    """1 to 3 rows of 1 to 4 tokens, scores wanted for some."""
    lists = BatchLists(block_size=4)
    for _ in range(chance.randint(1, 3)):
        start, count = chance.randint(0, 40), chance.randint(1, 4)
        table = [chance.randint(1, 99) for _ in range((start + count + 3) // 4)]
        lists.token_ids += [chance.randint(0, 1 << 40) for _ in range(count)]
        lists.positions += range(start, start + count)
        lists.add_slots(table, start, start + count)
        lists.tree_mask += [chance.randint(-(1 << 63), (1 << 63) - 1) for _ in range(count)]
        if chance.random() < 0.7:
            lists.logits_indices.append(len(lists.token_ids) - 1)
            lists.full_logits += [len(lists.logits_indices) - 1] * chance.randint(0, 1)
        lists.query_start_loc.append(len(lists.token_ids))
        lists.seq_lens.append(start + count)
        lists.num_causal.append(count)
        lists.first_places.append(chance.choice([0, 0, start]))
        lists.tables.append(table)
    return lists


def assert_holds(batch: RaggedBatch, lists: BatchLists) -> None:
    for name in ("token_ids", "positions", "tree_mask", "logits_indices", "full_logits"):
        assert getattr(batch, name).tolist() == getattr(lists, name) and getattr(batch, name).dtype == torch.int64, name
    for name in ("query_start_loc", "seq_lens", "num_causal"):
        assert getattr(batch, name).tolist() == getattr(lists, name) and getattr(batch, name).dtype == torch.int32, name
    assert batch.slot_mapping.tolist() == lists.slots
    firsts = [0] * len(lists.tables) if batch.first_places is None else batch.first_places.tolist()
    assert firsts == lists.first_places
    width = batch.block_tables.shape[1]
    assert batch.block_tables.tolist() == [[*table, *[0] * (width - len(table))] for table in lists.tables]
    assert batch.block_size == 4


def test_arrays_hold_what_the_lists_hold() -> None:
    chance, memory, found = random.Random(5), BatchMemory(), set[int]()
    for _ in range(300):
        lists = some_lists(chance)
        own, kept = lists.batch(), memory.batch(lists)
        assert_holds(own, lists)
        assert_holds(kept, lists)
        assert own.block_tables.shape[1] == max(map(len, lists.tables)) and kept.block_tables.shape[1] % TABLE_STEP == 0
        assert all(array.is_contiguous() for array in (kept.block_tables, kept.slot_mapping, kept.seq_lens))
        found.add(id(kept))
    assert len(found) < 250, "memory is used again"


def test_slots_are_those_of_the_table() -> None:
    lists = BatchLists(block_size=4)
    lists.add_slots([7, 2, 5], 3, 9)
    assert lists.slots == [31, 8, 9, 10, 11, 20]


def test_large_batches_are_not_kept() -> None:
    memory = BatchMemory()
    every = [*range(2000)]
    lists = BatchLists(16, every, every, every, [0] * 2000, [1999], [], [0, 2000], [2000], [2000], [], [[*range(125)]])
    first, second = memory.batch(lists), memory.batch(lists)
    assert first is not second and second.token_ids.shape == (2000,) and second.first_places is None
