"""The native executor's rotary embedding, paged cache and attention against the reference."""

import random
from dataclasses import replace

import pytest
import torch
from attention_reference import attention_reference
from native_attention import ISA_NUMBERS, TYPES, Layer, Row, Shape, context_slots, deal, each_isa, each_type, needs_library, ragged

from foretoken.kernels.native_abi import MAX_HEAD_DIM, CacheType
from foretoken.kernels.native_kv import BLOCK_SIZE

pytestmark = needs_library

BATCHES: dict[str, list[Row]] = {
    "decode": [Row(40, 1)],
    "prefill": [Row(0, 70)],
    "chunk over segments": [Row(250, 20), Row(511, 3)],
    "chain": [Row(50, 6)],
    "tree": [Row(21, 1, [-1, -1, 0, 0, 1, 3])],
    "tree of 64 over a segment's end": [Row(230, 1, [-1, *range(0, 40), 5, *range(20, 42)])],
    "tree without causal tokens": [Row(13, 0, [-1, 0, -1])],
    "bidirectional block": [Row(30, 1, masks=[0b11111] * 5, depths=[0, 1, 2, 3, 4]), Row(9, 2, masks=[0b111] * 3, depths=[1, 0, 1])],
    "no rows": [],
    "empty rows": [Row(0, 0), Row(8, 1), Row(5, 0)],
    "mixed": [Row(3, 1), Row(270, 4), Row(0, 33), Row(90, 1, [-1, -1, 0]), Row(170, 1), Row(1, 2, [-1, 0, 1, 1]), Row(0, 1)],
}
SHAPES: dict[str, Shape] = {
    "plain": Shape(),
    "one head, no rotation": Shape(kv_heads=1, group=1, rope_half=0, scale=0.3),
    "many heads, norms": Shape(kv_heads=1, group=20, k_dim=32, v_dim=32, rope_half=16, norm=True, scale=1.0),
    "odd dims, partial rotation": Shape(group=7, k_dim=37, v_dim=21, rope_half=9, norm=True, scale=0.4),
    "wide, 9 heads, norms behind, sinks": Shape(
        kv_heads=1, group=9, k_dim=80, v_dim=112, rope_half=40, norm=True, norm_last=True, grows=True, sinks=True
    ),
    "latent": Shape(kv_heads=1, group=20, k_dim=576, v_dim=512, rope_half=32, scale=0.05, values_in_keys=True),
    "values in odd keys": Shape(kv_heads=2, group=5, k_dim=45, v_dim=36, rope_half=9, norm=True, scale=0.3, values_in_keys=True),
    "window, sinks": Shape(window=19, sinks=True),
    "long window, softcap": Shape(window=200, softcap=4.0, scale=0.5),
}


def compare(shape: Shape, rows: list[Row], isa: int, padding: int = 0, seed: int = 1) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    layer, blocks = Layer(shape), deal(rows, rng)
    batch = ragged(rows, blocks)
    batch = ragged(rows, blocks, padded_to=len(batch.positions) + padding)
    layer.fill(context_slots(rows, blocks), generator)
    x = torch.randn(len(batch.positions), shape.width, generator=generator)
    out = layer.run(batch, x, isa, threads=rng.choice([1, 2, 5]), seed=rng.randrange(9))
    assert torch.equal(layer.run(batch, x, isa, narrow=True), out.bfloat16())
    q, k, v = layer.heads(x, batch.positions)
    real = batch.slot_mapping >= 0

    exact = shape.type == CacheType.FLOAT32
    stored_k, stored_v = layer.kv.gather(0, batch.slot_mapping[real])
    for stored, given in ((stored_k, k[real]), (stored_v, v[real])):
        if shape.type == CacheType.INT8:
            assert ((stored - given).abs() <= given.abs().amax(-1, keepdim=True) * (0.501 / 127)).all()
        else:
            torch.testing.assert_close(stored, given, rtol=2e-5 if exact else 2**-7, atol=2e-5 if exact else 1e-3)

    sinks = layer.sinks if shape.sinks else None
    expected = attention_reference(q, layer.torch_kv(), 0, batch, shape.scale, shape.window or None, shape.softcap or None, sinks)
    if exact:
        torch.testing.assert_close(out, expected, rtol=3e-5, atol=5e-6)
    else:
        torch.testing.assert_close(out, expected, rtol=0.03, atol=0.03)
        assert (out - expected).abs().mean() < 0.004 or out.numel() == 0


@pytest.mark.parametrize("name", BATCHES)
@each_type
def test_equals_the_reference(name: str, type: CacheType):
    compare(replace(SHAPES["plain"], type=type), BATCHES[name], -1)


@pytest.mark.parametrize("name", SHAPES)
@each_type
@each_isa
def test_shapes(name: str, type: CacheType, isa: int):
    compare(replace(SHAPES[name], type=type), BATCHES["mixed"], isa, padding=5)


@each_isa
def test_scores_of_wide_heads_do_not_overflow(isa: int):
    """Of an int8 cache, where all numbers of a query and of its key are the largest that there are."""
    shape = Shape(type=CacheType.INT8, kv_heads=1, group=1, k_dim=MAX_HEAD_DIM, v_dim=32, rope_half=0, scale=1 / MAX_HEAD_DIM)
    layer = Layer(shape)
    x = torch.ones(2, shape.width)
    x[0, shape.k_dim :] *= -1  # the first token's key and value
    out = layer.run(ragged([Row(0, 2)], [[1]]), 3 * x, isa)
    torch.testing.assert_close(out[1], torch.full((1, 32), 3.0), rtol=0.01, atol=0.0)


def random_rows(rng: random.Random, most: int) -> list[Row]:
    rows: list[Row] = []
    for _ in range(rng.randrange(1, most)):
        context, causal = rng.choice([0, 5, rng.randrange(330)]), rng.choice([0, 1, 1, rng.randrange(6), rng.randrange(40)])
        size = rng.randrange(9)
        if rng.random() < 0.3:  # a tree whose bits point anywhere; each token sees itself
            masks = [rng.getrandbits(size) | 1 << node for node in range(size)]
            rows.append(Row(context, causal, masks=masks, depths=[rng.randrange(size) for _ in masks]))
        elif rng.random() < 0.6:
            rows.append(Row(context, causal, [rng.randrange(-1, node) for node in range(size)]))
        else:
            rows.append(Row(context, causal))
    return rows


@pytest.mark.parametrize("seed", range(12))
def test_random_batches(seed: int):
    rng = random.Random(seed)
    k_dim = rng.randrange(4, 100)
    shape = Shape(
        type=TYPES[seed % 3], kv_heads=rng.randrange(1, 4), group=rng.choice([1, 2, 3, 5, 16, 17]), k_dim=k_dim,
        v_dim=rng.randrange(1, 100), window=rng.choice([0, 0, 1, 7, 60]), softcap=rng.choice([0.0, 3.0]),
        rope_half=rng.randrange(0, k_dim // 2 + 1), norm=rng.random() < 0.5, scale=0.3, sinks=seed % 2 == 1,
    )
    compare(shape, random_rows(rng, 7), rng.choice(ISA_NUMBERS), rng.randrange(3), seed)


@pytest.mark.parametrize("seed", range(15))
def test_leading_places_without_entries_are_never_read(seed: int):
    """They hold NaN. And what a row does not see changes no bit of it: alone, it computes what it does among others."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    shape = Shape(type=TYPES[seed % 3], window=rng.choice([0, 0, 1, 20, 200]), group=rng.choice([1, 3, 5]))
    rows = [*random_rows(rng, 6), Row(rng.randrange(300), 1, [rng.randint(-1, i - 1) for i in range(64)])]
    layer, blocks = Layer(shape), deal(rows, rng)
    firsts = [rng.choice([0, row.context, rng.randint(0, row.context), min(1, row.context)]) for row in rows]
    batch = replace(ragged(rows, blocks), first_places=torch.tensor(firsts, dtype=torch.int32))
    layer.fill(context_slots(rows, blocks), generator)
    for table, first in zip(blocks, firsts, strict=True):
        places = torch.arange(first)
        nan = torch.full((first, shape.kv_heads, shape.k_dim), torch.nan)
        layer.kv.write(0, torch.tensor(table)[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE, nan, nan)
    x = torch.randn(len(batch.positions), shape.width, generator=generator)
    out = layer.run(batch, x, threads=rng.choice([1, 2, 5]), seed=seed)
    q, _, _ = layer.heads(x, batch.positions)
    expected = attention_reference(q, layer.torch_kv(), 0, batch, shape.scale, shape.window or None)
    exact = shape.type == CacheType.FLOAT32
    torch.testing.assert_close(out, expected, rtol=3e-5 if exact else 0.03, atol=5e-6 if exact else 0.03)
    for i, row in enumerate(rows):
        start, end = batch.query_start_loc[i : i + 2].tolist()
        alone = replace(ragged([row], [blocks[i]]), first_places=torch.tensor(firsts[i : i + 1], dtype=torch.int32))
        assert torch.equal(layer.run(alone, x[start:end]), out[start:end])
