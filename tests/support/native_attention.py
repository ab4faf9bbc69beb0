"""One attention layer of the native executor, its cache and ragged batches over it, for tests of the kernels."""

import ctypes
import random
from collections.abc import Sequence
from ctypes import c_bool, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import paged_batches
import pytest
import torch
from paged_batches import batch_of
from torch import Tensor

from foretoken.kernels.layout import KVLayerSpec, RaggedBatch
from foretoken.kernels.native_abi import BatchView, CacheType
from foretoken.kernels.native_kv import BLOCK_SIZE, NativeKV
from foretoken.kernels.native_library import ISAS, load
from foretoken.kernels.torch_kv import TorchKV

library = load()
needs_library = pytest.mark.skipif(library is None or library.ft_isa() < 0, reason="no native library, or nothing that this machine runs")
ISA_NUMBERS = range(library.ft_isa() + 1) if library is not None else range(0)
each_isa = pytest.mark.parametrize("isa", ISA_NUMBERS, ids=lambda isa: ISAS[isa])
TYPES = list(CacheType)
each_type = pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name.lower())
NUM_BLOCKS = 160


class CacheLayer(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("type", "kv_heads", "k_dim", "v_dim", "k_pad", "v_pad")),
        *((name, c_int64) for name in ("head_bytes", "block_bytes")),
        ("base", c_void_p),
    ]


class AttentionOp(ctypes.Structure):
    _fields_ = [
        ("cache", CacheLayer), ("num_heads", c_int32), ("window", c_int32), ("scale", c_float), ("softcap", c_float), ("sinks", c_void_p),
        ("rope", c_void_p), ("rope_half", c_int32), ("growth", c_void_p), ("q_norm", c_void_p), ("k_norm", c_void_p), ("norm_eps", c_float),
        ("norm_last", c_bool), ("q", c_void_p), ("q_stride", c_int64), ("k", c_void_p), ("v", c_void_p), ("kv_stride", c_int64),
        ("queries", c_void_p), ("out", c_void_p), ("narrow_out", c_void_p), ("out_stride", c_int64), ("ahead", c_void_p),
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
    sinks: bool = False
    rope_half: int = 32
    norm: bool = False
    norm_last: bool = False
    grows: bool = False
    scale: float = 0.125
    values_in_keys: bool = False

    @property
    def num_heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def width(self) -> int:
        return (self.num_heads + self.kv_heads) * self.k_dim + self.kv_heads * (0 if self.values_in_keys else self.v_dim)


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
        self.sinks = 3 * torch.randn(shape.num_heads, generator=generator)
        angles = torch.arange(NUM_BLOCKS * BLOCK_SIZE)[:, None] * torch.logspace(0, -3, max(shape.rope_half, 1))
        self.rope = torch.cat([angles.cos(), angles.sin()], 1).contiguous()
        self.growth = 1 + torch.arange(NUM_BLOCKS * BLOCK_SIZE) / 100

    def run(
        self, batch: RaggedBatch, x: Tensor, isa: int = -1, threads: int = 1, seed: int = 0, only_write: bool = False,
        narrow: bool = False,
    ) -> Tensor:
        """x [T, width]: q | k | v. Writes the cache; returns [T, heads, v_dim]."""
        assert library is not None
        shape = self.shape
        num_heads = 0 if only_write else shape.num_heads
        pads = [-(-dim // 32) * 32 for dim in (shape.k_dim, shape.v_dim)]
        sizes = (self.block_bytes // shape.kv_heads, self.block_bytes)
        cache = CacheLayer(int(shape.type), shape.kv_heads, shape.k_dim, shape.v_dim, *pads, *sizes, self.kv.bases[0])
        x = x.contiguous()
        out = torch.full((len(x), num_heads * shape.v_dim), torch.nan, dtype=torch.bfloat16 if narrow else torch.float32)
        op = AttentionOp(
            cache=cache,
            num_heads=num_heads,
            window=shape.window,
            scale=shape.scale,
            softcap=shape.softcap,
            sinks=self.sinks.data_ptr() if shape.sinks else None,
            rope=self.rope.data_ptr() if shape.rope_half else None,
            rope_half=shape.rope_half,
            growth=self.growth.data_ptr() if shape.grows else None,
            q_norm=self.q_norm.data_ptr() if shape.norm else None,
            k_norm=self.k_norm.data_ptr() if shape.norm else None,
            norm_eps=1e-6,
            norm_last=shape.norm_last,
            q=x.data_ptr(),
            q_stride=x.shape[1],
            k=x.data_ptr() + 4 * num_heads * shape.k_dim,
            v=None if shape.values_in_keys else x.data_ptr() + 4 * (num_heads + shape.kv_heads) * shape.k_dim,
            kv_stride=x.shape[1],
            out=None if narrow else out.data_ptr(),
            narrow_out=out.data_ptr() if narrow else None,
            out_stride=out.shape[1],
        )
        view = view_of(batch)
        isa = ISA_NUMBERS[-1] if isa < 0 else isa
        assert library.ft_attention(isa, ctypes.byref(op), ctypes.byref(view), threads, seed)
        return out.view(len(x), num_heads, shape.v_dim)

    def heads(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [T, heads, dim] of x, normalised and rotated in torch."""
        shape = self.shape
        q, k, v = x.tensor_split([shape.num_heads * shape.k_dim, (shape.num_heads + shape.kv_heads) * shape.k_dim], 1)
        q, k = self._rotate(q, positions, self.q_norm), self._rotate(k, positions, self.k_norm)
        v = k[..., -shape.v_dim :] if shape.values_in_keys else v.unflatten(1, (-1, shape.v_dim))
        return q * self.growth[positions][:, None, None] if shape.grows else q, k, v

    def _rotate(self, x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
        x = x.unflatten(1, (-1, self.shape.k_dim))
        if self.shape.norm and not self.shape.norm_last:
            x = torch.nn.functional.rms_norm(x, (self.shape.k_dim,), weight, 1e-6)
        half = self.shape.rope_half
        cos, sin = self.rope[positions][:, None, :].split(max(half, 1), 2)
        a, b, rest = x.split([half, half, self.shape.k_dim - 2 * half], 2)
        x = torch.cat([a * cos - b * sin, b * cos + a * sin, rest], 2) if half else x
        return torch.nn.functional.rms_norm(x, (self.shape.k_dim,), weight, 1e-6) if self.shape.norm and self.shape.norm_last else x

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


def ragged(rows: Sequence[Row], blocks: Sequence[Sequence[int]], padded_to: int = 0) -> RaggedBatch:
    """Rows whose places lie in these blocks; padding tokens at the end."""
    nodes = [len(row.parents) or len(row.masks) for row in rows]
    num_tokens = sum(row.causal + count for row, count in zip(rows, nodes, strict=True))
    batch = batch_of(
        [
            paged_batches.Row([0] * row.causal, row.context, table, [(0, parent) for parent in row.parents or [-1] * count])
            for row, table, count in zip(rows, blocks, nodes, strict=True)
        ],
        padding=max(0, padded_to - num_tokens),
    )
    for row, end, count in zip(rows, batch.query_start_loc[1:].tolist(), nodes, strict=True):
        if row.masks:
            batch.tree_mask[end - count : end] = torch.tensor([mask - (1 << 64) if mask >> 63 else mask for mask in row.masks])
            batch.positions[end - count : end] = row.context + row.causal + torch.tensor(row.depths)
    return batch


def deal(rows: Sequence[Row], rng: random.Random) -> list[list[int]]:
    """Random blocks for each row."""
    deck = rng.sample(range(1, NUM_BLOCKS), NUM_BLOCKS - 1)
    return [[deck.pop() for _ in range(-(-row.seq_len // BLOCK_SIZE))] for row in rows]


def context_slots(rows: Sequence[Row], blocks: Sequence[Sequence[int]]) -> Tensor:
    """The slots that earlier passes have written."""
    slots = [t[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for row, t in zip(rows, blocks, strict=True) for p in range(row.context)]
    return torch.tensor(slots, dtype=torch.int64)
