from __future__ import annotations

import dataclasses

import pytest
import torch
from decoding import ragged
from small_networks import small_network

from foretoken.kernels.layout import RaggedBatch
from foretoken.kernels.static_batch import Ladder, Rung, StaticBatch
from foretoken.kernels.torch_executor import TorchExecutor, full_logits

BLOCK_SIZE, NUM_BLOCKS = 4, 40
CPU = torch.device("cpu")
FAMILIES = ("llama", "gemma2", "qwen3")


def prompts(executor: TorchExecutor) -> RaggedBatch:
    """Three rows from the start."""
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(executor.vocab_size, (n,), generator=generator).tolist() for n in (5, 1, 9)]
    return ragged([(text, 0, [row, row + 10, row + 20]) for row, text in enumerate(texts)])


def later(executor: TorchExecutor) -> RaggedBatch:
    """One token of a row, a chain of three of the next, and a tree of four behind one token of the last."""
    generator = torch.Generator().manual_seed(4)
    lengths, starts = (1, 3, 5), (5, 1, 9)
    rows = [
        (torch.randint(executor.vocab_size, (n,), generator=generator).tolist(), start, [row, row + 10, row + 20, row + 30])
        for row, (n, start) in enumerate(zip(lengths, starts, strict=True))
    ]
    batch = ragged(rows)
    mask, positions = batch.tree_mask.clone(), batch.positions.clone()
    mask[5:] = torch.tensor([0b0001, 0b0010, 0b0101, 0b1101])
    positions[5:] = torch.tensor([10, 10, 11, 12])
    return dataclasses.replace(
        batch,
        tree_mask=mask,
        positions=positions,
        num_causal=torch.tensor([1, 3, 1], dtype=torch.int32),
        logits_indices=torch.tensor([0, 1, 3, 4, 8]),
        full_logits=torch.tensor([1, 4]),
    )


@pytest.mark.parametrize("rung", [Rung(9, 9), Rung(12, 12), Rung(32, 8)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_batch_computes_what_the_batch_does(family: str, rung: Rung) -> None:
    executor = small_network(family)
    kv, padded_kv = executor.allocate(NUM_BLOCKS, BLOCK_SIZE), executor.allocate(NUM_BLOCKS, BLOCK_SIZE)
    first, second = prompts(executor), later(executor)
    hidden = (0, 2)
    for batch in (kv, padded_kv):
        executor.run(first, batch)
    expected = executor.run(second, kv, hidden)

    static = StaticBatch(rung, max_blocks=8, block_size=BLOCK_SIZE, device=CPU)
    for garbage in (first, second):  # what an earlier batch left behind may not show
        if rung.holds(garbage):
            static.fill(garbage)
    static.fill(second)
    assert len(static.batch.token_ids) == len(static.batch.logits_indices) == rung.tokens and len(static.batch.seq_lens) == rung.rows
    computed = executor.compute(static.batch, padded_kv, hidden)
    wanted = len(second.logits_indices)
    torch.testing.assert_close(computed.argmax[:wanted], expected.argmax)
    torch.testing.assert_close(computed.top[:wanted], expected.top)
    torch.testing.assert_close(full_logits(computed, second.full_logits), expected.logits)
    for boundary in hidden:
        torch.testing.assert_close(computed.hidden[boundary][: len(second.token_ids)], expected.hidden[boundary])
    slots = torch.cat([first.slot_mapping, second.slot_mapping])
    for layer in range(len(executor.kv_layers)):
        torch.testing.assert_close(padded_kv.gather(layer, slots), kv.gather(layer, slots))


def test_an_empty_rung_writes_nowhere() -> None:
    executor = small_network()
    kv = executor.allocate(4, BLOCK_SIZE)
    for cache in (*kv.k, *kv.v):
        cache.fill_(7.0)
    executor.compute(StaticBatch(Rung(6, 6), 4, BLOCK_SIZE, CPU).batch, kv)
    assert all(bool((cache == 7.0).all()) for cache in (*kv.k, *kv.v))


def test_the_ladder() -> None:
    ladder = Ladder((1, 2, 4, 8))
    assert [ladder.up(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, None]
    assert ladder.below(3).counts == (1, 2, 4) and ladder.below(100).counts == ladder.counts
    assert ladder.rung(prompts(small_network())) is None  # 15 tokens
    assert Ladder((16,)).rung(prompts(small_network())) == Rung(16, 4)  # 15 tokens in 3 rows
    assert [ladder.rung_of(8, rows) for rows in (1, 2, 3, 8)] == [Rung(8, 1), Rung(8, 2), Rung(8, 4), Rung(8, 8)]
    assert ladder.rung_of(2, 5) == Rung(8, 8) and ladder.rung_of(9, 1) is None


@pytest.mark.parametrize("first_places", [None, [2, 0, 1]])
def test_first_places_are_those_of_the_batch(first_places: list[int] | None) -> None:
    executor = small_network()
    static = StaticBatch(Rung(16, 16), 8, BLOCK_SIZE, CPU)
    given = None if first_places is None else torch.tensor(first_places, dtype=torch.int32)
    static.fill(dataclasses.replace(later(executor), first_places=torch.tensor([9, 9, 9], dtype=torch.int32)))
    static.fill(dataclasses.replace(later(executor), first_places=given))
    assert static.batch.first_places is not None
    assert static.batch.first_places.tolist() == [*(first_places or [0, 0, 0]), *[0] * 13]
