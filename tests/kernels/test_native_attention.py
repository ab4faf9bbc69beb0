"""The native executor's rotary embedding, paged cache and attention: against the reference, and bit for bit against themselves."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from attention_reference import attention_reference
from torch import Tensor

from foretoken.kernels.layout import KVLayerSpec, RaggedBatch
from foretoken.kernels.native_abi import BatchView, CacheType
from foretoken.kernels.native_kv import BLOCK_SIZE, NativeKV
from foretoken.kernels.native_library import ISAS, load
from foretoken.kernels.torch_kv import TorchKV

library = load()
pytestmark = pytest.mark.skipif(library is None or library.ft_isa() < 0, reason="no native library, or no AVX-512 on this machine")
ISA_NUMBERS = range(library.ft_isa() + 1) if library is not None else range(0)
NUM_BLOCKS = 160
SEGMENT = 256
TYPES = list(CacheType)


class CacheLayer(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("type", "kv_heads", "k_dim", "v_dim", "k_pad", "v_pad")),
        *((name, c_int64) for name in ("head_bytes", "block_bytes")),
        ("base", c_void_p),
    ]


class AttentionOp(ctypes.Structure):
    _fields_ = [
        ("cache", CacheLayer),
        ("num_heads", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("rope", c_void_p),
        ("rope_half", c_int32),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("norm_eps", c_float),
        ("input", c_void_p),
        ("input_stride", c_int64),
        ("queries", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
    ]


@dataclass(frozen=True)
class Shape:
    """One attention layer. rope_half 0 = no rotation."""

    type: CacheType = CacheType.BFLOAT16
    kv_heads: int = 2
    group: int = 3  # query heads of a kv head
    k_dim: int = 64
    v_dim: int = 64
    window: int = 0
    softcap: float = 0.0
    rope_half: int = 32
    norm: bool = False
    scale: float = 0.125

    @property
    def num_heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def width(self) -> int:
        return (self.num_heads + self.kv_heads) * self.k_dim + self.kv_heads * self.v_dim


class Layer:
    """A shape with its weights, its rotary table and a cache full of NaN: what a pass has not written is another's memory."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        assert library is not None
        generator = torch.Generator().manual_seed(seed)
        self.shape = shape
        spec = KVLayerSpec(shape.kv_heads, shape.k_dim, shape.v_dim)
        self.kv = NativeKV(library, (spec,), NUM_BLOCKS, BLOCK_SIZE, shape.type)
        self.block_bytes = library.ft_cache_block_bytes(int(shape.type), shape.kv_heads, shape.k_dim, shape.v_dim)
        ctypes.memset(self.kv.bases[0], 0xFF, self.block_bytes * NUM_BLOCKS)
        self.q_norm, self.k_norm = torch.rand(2, shape.k_dim, generator=generator) + 0.5
        angles = torch.arange(NUM_BLOCKS * BLOCK_SIZE)[:, None] * torch.logspace(0, -3, max(shape.rope_half, 1))
        self.rope = torch.cat([angles.cos(), angles.sin()], 1).contiguous()

    def run(self, batch: RaggedBatch, x: Tensor, isa: int = -1, threads: int = 1, seed: int = 0, only_write: bool = False) -> Tensor:
        """x [T, width]: q | k | v. Writes the cache; returns [T, heads, v_dim]."""
        assert library is not None
        shape = self.shape
        num_heads = 0 if only_write else shape.num_heads
        pads = [-(-dim // 32) * 32 for dim in (shape.k_dim, shape.v_dim)]
        sizes = (self.block_bytes // shape.kv_heads, self.block_bytes)
        cache = CacheLayer(int(shape.type), shape.kv_heads, shape.k_dim, shape.v_dim, *pads, *sizes, self.kv.bases[0])
        x = x.contiguous()
        out = torch.full((len(x), num_heads * shape.v_dim), torch.nan)
        op = AttentionOp(
            cache=cache,
            num_heads=num_heads,
            window=shape.window,
            scale=shape.scale,
            softcap=shape.softcap,
            rope=self.rope.data_ptr() if shape.rope_half else None,
            rope_half=shape.rope_half,
            q_norm=self.q_norm.data_ptr() if shape.norm else None,
            k_norm=self.k_norm.data_ptr() if shape.norm else None,
            norm_eps=1e-6,
            input=x.data_ptr(),
            input_stride=x.shape[1],
            out=out.data_ptr(),
            out_stride=out.shape[1],
        )
        view = view_of(batch)
        isa = ISA_NUMBERS[-1] if isa < 0 else isa
        assert library.ft_attention(isa, ctypes.byref(op), ctypes.byref(view), threads, seed)
        return out.view(len(x), num_heads, shape.v_dim)

    def heads(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [T, heads, dim] of x, normalised and rotated in torch."""
        shape = self.shape
        sizes = [shape.num_heads * shape.k_dim, shape.kv_heads * shape.k_dim, shape.kv_heads * shape.v_dim]
        q, k, v = x.split(sizes, 1)
        return self._rotate(q, positions, self.q_norm), self._rotate(k, positions, self.k_norm), v.unflatten(1, (-1, shape.v_dim))

    def _rotate(self, x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
        x = x.unflatten(1, (-1, self.shape.k_dim))
        if self.shape.norm:
            x = torch.nn.functional.rms_norm(x, (self.shape.k_dim,), weight, 1e-6)
        half = self.shape.rope_half
        cos, sin = self.rope[positions][:, None, :].split(max(half, 1), 2)
        a, b, rest = x.split([half, half, self.shape.k_dim - 2 * half], 2)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], 2) if half else x

    def fill(self, slots: Tensor, generator: torch.Generator) -> None:
        """Random k and v in these slots."""
        shape = self.shape
        k = torch.randn(len(slots), shape.kv_heads, shape.k_dim, generator=generator)
        self.kv.write(0, slots, k, torch.randn(len(slots), shape.kv_heads, shape.v_dim, generator=generator))

    def torch_kv(self) -> TorchKV:
        """The cache as the reference reads it."""
        shape = self.shape
        kv = TorchKV((KVLayerSpec(shape.kv_heads, shape.k_dim, shape.v_dim),), NUM_BLOCKS, BLOCK_SIZE, torch.float32)
        kv.k[0], kv.v[0] = self.kv.gather(0, torch.arange(NUM_BLOCKS * BLOCK_SIZE))
        return kv

    def bytes(self) -> bytes:
        return ctypes.string_at(self.kv.bases[0], self.block_bytes * NUM_BLOCKS)


def view_of(batch: RaggedBatch) -> BatchView:
    """Valid as long as the batch lives."""
    tensors = (batch.token_ids, batch.positions, batch.slot_mapping, batch.query_start_loc, batch.seq_lens, batch.block_tables)
    tensors += (batch.num_causal, batch.tree_mask, batch.logits_indices)
    tensors += () if batch.first_places is None else (batch.first_places,)
    assert all(tensor.is_contiguous() for tensor in tensors)
    counts = (len(batch.token_ids), len(batch.seq_lens), batch.block_tables.shape[1], len(batch.logits_indices))
    return BatchView(*counts, *(tensor.data_ptr() for tensor in tensors))


@dataclass(frozen=True)
class Row:
    """context places in the cache, then causal tokens, then a tree: parents [-1, 0, 0], or masks given outright."""

    context: int
    causal: int
    parents: Sequence[int] = ()
    masks: Sequence[int] = ()
    depths: Sequence[int] = ()

    @property
    def seq_len(self) -> int:
        return self.context + self.causal + max(len(self.parents), len(self.masks))


def ancestors(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Masks and depths: [-1, 0, 0] -> [0b1, 0b11, 0b101], [0, 1, 1]."""
    masks: list[int] = []
    depths: list[int] = []
    for node, parent in enumerate(parents):
        masks.append(1 << node | (masks[parent] if parent >= 0 else 0))
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return masks, depths


def ragged(rows: Sequence[Row], blocks: Sequence[Sequence[int]], padded_to: int = 0) -> RaggedBatch:
    """Rows whose places lie in these blocks; padding tokens at the end."""
    positions: list[int] = []
    slots: list[int] = []
    tree_mask: list[int] = []
    starts = [0]
    for row, table in zip(rows, blocks, strict=True):
        masks, depths = (list(row.masks), list(row.depths)) if row.masks else ancestors(row.parents)
        first_tree = row.context + row.causal
        positions += [*range(row.context, first_tree), *(first_tree + depth for depth in depths)]
        slots += [table[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for place in range(row.context, row.seq_len)]
        tree_mask += [0] * row.causal + [mask - (1 << 64) if mask >> 63 else mask for mask in masks]
        starts.append(len(slots))
    padding = max(0, padded_to - len(slots))
    width = max((len(table) for table in blocks), default=0) + 1
    return RaggedBatch(
        token_ids=torch.zeros(len(slots) + padding, dtype=torch.int64),
        positions=torch.tensor(positions + [0] * padding, dtype=torch.int64),
        slot_mapping=torch.tensor(slots + [-1] * padding, dtype=torch.int64),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor([row.seq_len for row in rows], dtype=torch.int32),
        block_tables=torch.tensor([[*table, *[0] * (width - len(table))] for table in blocks], dtype=torch.int32).view(len(rows), width),
        num_causal=torch.tensor([row.causal for row in rows], dtype=torch.int32),
        tree_mask=torch.tensor(tree_mask + [0] * padding, dtype=torch.int64),
        logits_indices=torch.arange(0),
        full_logits=torch.arange(0),
        block_size=BLOCK_SIZE,
    )


def deal(rows: Sequence[Row], rng: random.Random) -> list[list[int]]:
    """Random blocks for each row."""
    deck = rng.sample(range(1, NUM_BLOCKS), NUM_BLOCKS - 1)
    return [[deck.pop() for _ in range(-(-row.seq_len // BLOCK_SIZE))] for row in rows]


def context_slots(rows: Sequence[Row], blocks: Sequence[Sequence[int]]) -> Tensor:
    """The slots that earlier passes have written."""
    slots = [t[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for row, t in zip(rows, blocks, strict=True) for p in range(row.context)]
    return torch.tensor(slots, dtype=torch.int64)


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
    "wide, 9 heads": Shape(kv_heads=1, group=9, k_dim=80, v_dim=112, rope_half=40),
    "window": Shape(window=19),
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
    q, k, v = layer.heads(x, batch.positions)
    real = batch.slot_mapping >= 0

    exact = shape.type == CacheType.FLOAT32
    stored_k, stored_v = layer.kv.gather(0, batch.slot_mapping[real])
    for stored, given in ((stored_k, k[real]), (stored_v, v[real])):
        if shape.type == CacheType.INT8:
            assert ((stored - given).abs() <= given.abs().amax(-1, keepdim=True) * (0.501 / 127)).all()
        else:
            torch.testing.assert_close(stored, given, rtol=2e-5 if exact else 2**-7, atol=2e-5 if exact else 1e-3)

    expected = attention_reference(q, layer.torch_kv(), 0, batch, shape.scale, shape.window or None, shape.softcap or None)
    if exact:
        torch.testing.assert_close(out, expected, rtol=3e-5, atol=5e-6)
    else:
        torch.testing.assert_close(out, expected, rtol=0.03, atol=0.03)
        assert (out - expected).abs().mean() < 0.004 or out.numel() == 0


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name.lower())
def test_equals_the_reference(name: str, type: CacheType):
    compare(replace(SHAPES["plain"], type=type), BATCHES[name], -1)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name.lower())
@pytest.mark.parametrize("isa", ISA_NUMBERS, ids=lambda isa: ISAS[isa])
def test_shapes(name: str, type: CacheType, isa: int):
    compare(replace(SHAPES[name], type=type), BATCHES["mixed"], isa, padding=5)


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
        type=TYPES[seed % 3],
        kv_heads=rng.randrange(1, 4),
        group=rng.choice([1, 2, 3, 5, 16, 17]),
        k_dim=k_dim,
        v_dim=rng.randrange(1, 100),
        window=rng.choice([0, 0, 1, 7, 60]),
        softcap=rng.choice([0.0, 3.0]),
        rope_half=rng.randrange(0, k_dim // 2 + 1),
        norm=rng.random() < 0.5,
        scale=0.3,
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


# ---- the same bits, however a token is computed


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
    "window": Shape(kv_heads=1, window=90, group=2),
    "odd": Shape(kv_heads=2, group=7, k_dim=20, v_dim=24, rope_half=10, softcap=5.0),
    "one head": Shape(kv_heads=1, group=1, k_dim=32, v_dim=128, rope_half=16),
}


@pytest.mark.parametrize("name", INVARIANT_SHAPES)
@pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name.lower())
@pytest.mark.parametrize("isa", ISA_NUMBERS, ids=lambda isa: ISAS[isa])
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


@pytest.mark.parametrize("name", INVARIANT_SHAPES)
@pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name.lower())
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


@pytest.mark.parametrize("context", [0, 3, 30, 245, 255, 256, 300])
@pytest.mark.parametrize("name", INVARIANT_SHAPES)
@pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name.lower())
def test_a_tree_token_is_the_token_of_a_chain(context: int, name: str, type: CacheType):
    """Each path of a tree gives the bits of a chain of those tokens, and so does what follows once the path has been moved."""
    rng = random.Random(context)
    shape = replace(INVARIANT_SHAPES[name], type=type)
    size = rng.choice([9, 40, 64])
    parents = [rng.randrange(max(-1, node - 4), node) for node in range(size)]
    tree = Row(context, 1, parents)
    generator = torch.Generator().manual_seed(context)
    past = torch.randn(context, shape.width, generator=generator)
    x = torch.randn(1 + size, shape.width, generator=generator)
    after = torch.randn(1, shape.width, generator=generator)

    layer, blocks = Layer(shape), deal([Row(context, size + 2)], rng)[0]
    if context:
        layer.run(ragged([Row(0, context)], [blocks]), past, only_write=True)
    batch = ragged([tree], [blocks])
    out = layer.run(batch, x, threads=rng.choice([1, 4]), seed=5)

    masks, _ = ancestors(parents)
    leaves = rng.sample(range(size), 4)
    for leaf in leaves:
        path = [node for node in range(size) if masks[leaf] >> node & 1]
        chain, chain_blocks = Layer(shape), deal([Row(context, size + 2)], rng)[0]
        chain.run(ragged([Row(0, context)], [chain_blocks]), past, only_write=True)
        index = torch.tensor([0, *(1 + node for node in path)])
        chain_out = chain.run(ragged([Row(context, len(index))], [chain_blocks]), x[index])
        assert torch.equal(out[index], chain_out)
        if leaf != leaves[-1]:
            continue
        layer.kv.move(batch.slot_mapping[index], batch.slot_mapping[: len(index)])
        step = Row(context + len(index), 1)
        assert torch.equal(layer.run(ragged([step], [blocks]), after), chain.run(ragged([step], [chain_blocks]), after))


@pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name.lower())
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


# ---- the cache


@pytest.mark.parametrize("isa", ISA_NUMBERS, ids=lambda isa: ISAS[isa])
@pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name.lower())
def test_passes_write_what_write_writes(type: CacheType, isa: int):
    """Pads, scales and rounding included: the bytes are the same."""
    shape = Shape(type=type, kv_heads=2, k_dim=37, v_dim=21, rope_half=0)
    row = Row(0, 50)
    blocks = deal([row], random.Random(4))
    batch = ragged([row], blocks)
    x = torch.randn(50, shape.width, generator=torch.Generator().manual_seed(1)) * torch.logspace(-30, 6, 50)[:, None]
    x[7] = 0.0
    x[8, -1] = torch.inf
    x[9, -1] = torch.nan
    by_pass, by_write = Layer(shape), Layer(shape)
    by_pass.run(batch, x[:, 6 * 37 :], isa, only_write=True)
    _, k, v = by_write.heads(x, batch.positions)
    by_write.kv.write(0, batch.slot_mapping, k, v)
    assert by_pass.bytes() == by_write.bytes()
    _, stored = by_write.kv.gather(0, batch.slot_mapping)
    assert not torch.isfinite(stored[[8, 9], 1]).all(1).any()


@pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name.lower())
def test_write_skips_padding_and_gather_returns_it(type: CacheType):
    shape = Shape(type=type, kv_heads=2, k_dim=8, v_dim=5)
    layer = Layer(shape)
    k, v = torch.randint(-127, 128, (3, 2, 8)).float(), torch.randint(-127, 128, (3, 2, 5)).float()
    k[:, :, 0] = v[:, :, 0] = 127.0  # scale 1: exact in all types
    before = layer.bytes()
    layer.kv.write(0, torch.tensor([-1, -1, -1]), k, v)
    assert layer.bytes() == before
    layer.kv.write(0, torch.tensor([5, -1, 37]), k, v)
    gathered_k, gathered_v = layer.kv.gather(0, torch.tensor([37, 5]))
    assert torch.equal(gathered_k, k[[2, 0]]) and torch.equal(gathered_v, v[[2, 0]])


@pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name.lower())
def test_move_reads_all_before_it_writes(type: CacheType):
    layer = Layer(Shape(type=type, kv_heads=2, k_dim=40, v_dim=24))
    slots = torch.arange(64)
    layer.fill(slots, torch.Generator().manual_seed(1))
    k, v = layer.kv.gather(0, slots)
    source = torch.arange(64)
    source[torch.tensor([2, 3, 1, 20, 33])] = torch.tensor([1, 2, 3, 33, 63])
    moved = (source != slots).nonzero()[:, 0]
    layer.kv.move(source[moved], moved)
    moved_k, moved_v = layer.kv.gather(0, slots)
    assert torch.equal(moved_k, k[source]) and torch.equal(moved_v, v[source])
