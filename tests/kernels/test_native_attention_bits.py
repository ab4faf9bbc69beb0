"""The native executor's attention gives a token the same bits, however it is computed and whoever is computed with it."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from native_attention import ISA_NUMBERS, Layer, Row, Shape, context_slots, deal, each_isa, each_type, needs_library, ragged
from torch import Tensor

from foretoken.engine.runner import ancestors
from foretoken.kernels.native_abi import CacheType

pytestmark = needs_library
SEGMENT = 256


class Tokens:
    """A sequence with fixed q | k | v of each token, computed in any arrangement, in any blocks."""

    def __init__(self, shape: Shape, length: int, seed: int) -> None:
        self.x = torch.randn(length, shape.width, generator=torch.Generator().manual_seed(seed))

    def run(self, layer: Layer, chunks: Sequence[int], blocks: list[int], **options: Any) -> Tensor:
        outs: list[Tensor] = []
        start = 0
        for chunk in chunks:
            outs.append(layer.run(ragged([Row(start, chunk)], [blocks]), self.x[start : start + chunk], **options))
            start += chunk
        return torch.cat(outs)


INVARIANT_SHAPES: dict[str, Shape] = {
    "plain": Shape(kv_heads=1),
    "window, sinks": Shape(kv_heads=1, window=90, group=2, sinks=True),
    "odd": Shape(kv_heads=2, group=7, k_dim=20, v_dim=24, rope_half=10, softcap=5.0, norm=True, norm_last=True, grows=True),
    "latent": Shape(kv_heads=1, group=20, k_dim=72, v_dim=64, rope_half=4, values_in_keys=True),
    "one head": Shape(kv_heads=1, group=1, k_dim=32, v_dim=128, rope_half=16),
}


@pytest.mark.parametrize("name", INVARIANT_SHAPES)
@each_type
@each_isa
def test_chunks_blocks_threads_and_order_change_no_bit(name: str, type: CacheType, isa: int):
    rng = random.Random(name)
    shape = replace(INVARIANT_SHAPES[name], type=type)
    length = 2 * SEGMENT + 40
    tokens = Tokens(shape, length, 3)
    row = Row(0, length)
    expected = tokens.run(Layer(shape), [length], deal([row], rng)[0], isa=isa)
    assert torch.isfinite(expected).all()
    for size in (1, 5, 16, 64, 257):
        chunks = [size] * (length // size) + [length % size] * (length % size > 0)
        out = tokens.run(Layer(shape), chunks, deal([row], rng)[0], isa=isa, threads=rng.choice([1, 2, 3, 16]), seed=rng.randrange(100))
        assert torch.equal(out, expected), f"chunks of {size}"


def same_bits_with_threads(shape: Shape, rows: list[Row], counts: tuple[int, ...]) -> None:
    blocks = deal(rows, random.Random(len(rows)))
    layer, generator = Layer(shape), torch.Generator().manual_seed(4)
    layer.fill(context_slots(rows, blocks), generator)
    batch = ragged(rows, blocks)
    x = torch.randn(len(batch.token_ids), shape.width, generator=generator)
    expected = layer.run(batch, x)
    assert torch.isfinite(expected).all()
    for threads in counts:
        assert torch.equal(layer.run(batch, x, threads=threads, seed=threads), expected), f"{threads} threads"


@each_type
@pytest.mark.parametrize("contexts", [(600,), (20, 530), (3, 700, 250, 40)])
def test_however_many_threads_share_a_step_it_has_the_same_bits(contexts: tuple[int, ...], type: CacheType):
    """Few rows are cut between segments until each thread has its share: between heads, tiles and segments, wherever that is."""
    rows = [Row(context, 16, [-1, 0] * (context == 700)) for context in contexts]
    same_bits_with_threads(Shape(kv_heads=3, group=3, type=type), rows, (2, 3, 4, 5, 7, 16, 64))


@each_type
def test_heads_over_one_wide_key_have_the_same_bits_however_they_are_divided(type: CacheType):
    """More threads than tiles and segments: there are fewer vectors in a tile, then."""
    shape = Shape(kv_heads=1, group=16, k_dim=576, v_dim=512, values_in_keys=True, type=type)
    same_bits_with_threads(shape, [Row(250, 1, [-1, 0, -1])], (8, 16, 64))


@pytest.mark.parametrize("threads", [1, 2, 16])
@pytest.mark.parametrize("context", [10, 600])
def test_who_sees_nothing_gets_zeros(context: int, threads: int):
    """A row of a drafter whose first places nobody may see, its own first tokens among them."""
    rng = random.Random(1)
    shape = Shape(kv_heads=3, group=3)
    rows = [Row(context, 9), Row(40, 2)]
    blocks = deal(rows, rng)
    layer, generator = Layer(shape), torch.Generator().manual_seed(4)
    layer.fill(context_slots(rows, blocks), generator)
    batch = replace(ragged(rows, blocks), first_places=torch.tensor([context + 6, 0], dtype=torch.int32))
    out = layer.run(batch, torch.randn(11, shape.width, generator=generator), threads=threads, seed=threads)
    assert (out[:6] == 0).all()
    assert (out[6:] != 0).any(-1).all()


@pytest.mark.parametrize("name", INVARIANT_SHAPES)
@each_type
def test_other_rows_change_no_bit(name: str, type: CacheType):
    rng = random.Random(7)
    shape = replace(INVARIANT_SHAPES[name], type=type)
    rows = [Row(rng.randrange(300), rng.choice([1, 1, 4, 9])) for _ in range(12)]
    blocks = deal(rows, rng)
    layer, generator = Layer(shape), torch.Generator().manual_seed(8)
    layer.fill(context_slots(rows, blocks), generator)
    batch = ragged(rows, blocks, padded_to=80)
    x = torch.randn(80, shape.width, generator=generator)
    together = layer.run(batch, x, threads=2, seed=1)
    for i, row in enumerate(rows):
        start, end = batch.query_start_loc[i : i + 2].tolist()
        assert torch.equal(layer.run(ragged([row], [blocks[i]]), x[start:end]), together[start:end])
    assert (together[int(batch.query_start_loc[-1]) :] == 0).all()


@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize("context", [0, 3, 30, 245, 252, 256, 300, 515, 529])
@pytest.mark.parametrize("name", INVARIANT_SHAPES)
@each_type
def test_a_tree_token_is_the_token_of_a_chain(context: int, name: str, type: CacheType, poisoned: bool):
    """Each path of a tree gives the bits of a chain of those tokens, whatever others hold, and so does what follows once it is moved."""
    rng = random.Random(f"{context} {name} {type} {poisoned}")
    shape = replace(INVARIANT_SHAPES[name], type=type)
    size, isa = rng.choice([9, 40, 64]), rng.choice([-1, *ISA_NUMBERS])
    parents = [rng.randrange(max(-1, node - 4), node) for node in range(size)]
    causal, first = rng.choice([1, 1, 3]), rng.choice([0, 0, context, rng.randint(0, context)])
    generator = torch.Generator().manual_seed(context)
    past = torch.randn(context, shape.width, generator=generator)
    x = torch.randn(causal + size, shape.width, generator=generator)
    for node in rng.sample(range(size), size // 9 * poisoned):
        x[causal + node, -rng.choice([1, shape.v_dim]) :] = rng.choice([torch.inf, torch.nan])
    after = torch.randn(1, shape.width, generator=generator)

    def run(layer: Layer, blocks: list[int], row: Row, x: Tensor) -> Tensor:
        batch = replace(ragged([row], [blocks]), first_places=torch.tensor([first], dtype=torch.int32))
        return layer.run(batch, x, isa, threads=rng.choice([1, 4, 16]), seed=5)

    def same(a: Tensor, b: Tensor) -> bool:
        return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())

    def begin() -> tuple[Layer, list[int]]:
        layer, blocks = Layer(shape), deal([Row(context, size + 4)], rng)[0]
        if context:
            layer.run(ragged([Row(0, context)], [blocks]), past, isa, only_write=True)
        return layer, blocks

    layer, blocks = begin()
    out = run(layer, blocks, Row(context, causal, parents), x)
    _, masks = ancestors(parents)
    index, (chain, chain_blocks) = torch.arange(0), begin()
    for leaf in rng.sample(range(size), 5):
        index = torch.tensor([*range(causal), *(causal + node for node in range(size) if masks[leaf] >> node & 1)])
        chain, chain_blocks = begin()
        assert same(out[index], run(chain, chain_blocks, Row(context, len(index)), x[index]))
    slots = ragged([Row(context, causal, parents)], [blocks]).slot_mapping
    layer.kv.move(slots[index], slots[: len(index)])
    step = Row(context + len(index), 1)
    assert same(run(layer, blocks, step, after), run(chain, chain_blocks, step, after))


@each_type
def test_what_a_token_does_not_see_has_no_effect_even_as_nan(type: CacheType):
    shape = Shape(type=type, kv_heads=1, window=20)
    generator = torch.Generator().manual_seed(2)
    row = Row(45, 4, [-1, -1, 0])
    blocks = deal([row], random.Random(1))
    x = torch.randn(7, shape.width, generator=generator)
    batch = ragged([row], blocks)

    def outputs(poisoned: torch.Tensor) -> Tensor:
        layer = Layer(shape)  # its other slots are NaN
        layer.fill(context_slots([row], blocks), torch.Generator().manual_seed(9))
        q, k, v = x.split([3 * 64, 64, 64], 1)
        keep = torch.where(poisoned, torch.nan, 0.0)[:, None]
        return layer.run(batch, torch.cat([q, k + keep, v + keep], 1))

    clean = outputs(torch.zeros(7, dtype=torch.bool))
    assert torch.isfinite(clean).all()
    seen_by = {3: [3, 4, 5, 6], 2: [2, 3, 4, 5, 6], 5: [5], 4: [4, 6]}
    for token, readers in seen_by.items():
        out = outputs(torch.arange(7) == token)
        for other in range(7):
            if other in readers:
                assert not torch.isfinite(out[other]).any()
            else:
                assert torch.equal(out[other], clean[other])


def test_padding_inside_rows_gives_zeros_and_changes_nothing_else():
    shape = Shape(kv_heads=1)
    rows = [Row(10, 1), Row(12, 1), Row(9, 3), Row(3, 1, [-1, -1])]
    blocks = deal(rows, random.Random(1))
    batch = ragged(rows, blocks)
    layer, generator = Layer(shape), torch.Generator().manual_seed(7)
    layer.fill(context_slots(rows, blocks), generator)
    x = torch.randn(8, shape.width, generator=generator)
    padded = replace(batch, slot_mapping=batch.slot_mapping.clone())
    padding = torch.tensor([0, 4, 7])
    padded.slot_mapping[padding] = -1
    out = layer.run(padded, x)
    assert (out[padding] == 0).all()
    expected = layer.run(batch, x)
    assert torch.equal(out[[1, 2, 3, 5, 6]], expected[[1, 2, 3, 5, 6]])
