"""Paged attention in torch: the cache of one network, and what reads and writes it.

Owns the memory layout of `TorchKV` and the meaning of a `RaggedBatch` for attention. Knows no network and no weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import KVLayerSpec, RaggedBatch


class TorchKV:
    """The cache as torch tensors: per layer k [slots, kv_heads, k_dim] and v [slots, kv_heads, v_dim].

    Slots start uninitialised. Nothing reads a slot that no pass has written.
    """

    def __init__(
        self, layers: tuple[KVLayerSpec, ...], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        slots = num_blocks * block_size
        self.k = [torch.empty(slots, spec.num_kv_heads, spec.k_dim, dtype=dtype, device=device) for spec in layers]
        self.v = [torch.empty(slots, spec.num_kv_heads, spec.v_dim, dtype=dtype, device=device) for spec in layers]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k [T, kv_heads, k_dim], v [T, kv_heads, v_dim] at slots [T]; slot -1 is written nowhere."""
        if (slots < 0).any():
            kept = slots >= 0
            slots, k, v = slots[kept], k[kept], v[kept]
        self.k[layer].index_copy_(0, slots, k)
        self.v[layer].index_copy_(0, slots, v)

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """k [n, kv_heads, k_dim] and v [n, kv_heads, v_dim] at slots [n]."""
        return self.k[layer].index_select(0, slots), self.v[layer].index_select(0, slots)

    def move(self, src: Tensor, dst: Tensor) -> None:
        """Copy slots src [n] to dst [n] in all layers, as if all were read before any is written."""
        for cache in (*self.k, *self.v):
            cache.index_copy_(0, dst, cache.index_select(0, src))


class AttentionPlan:
    """Everything about a ragged batch that all layers share, built once per pass."""

    def __init__(self, batch: RaggedBatch) -> None:
        self.batch = batch


def paged_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    kv: TorchKV,
    layer: int,
    plan: AttentionPlan,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of q [T, H, k_dim] over the cache, [T, H, v_dim]; k and v [T, kv_heads, dim] are written to it first.

    k None: attend only. Who sees whom is said by RaggedBatch. What padding tokens get is finite and means nothing.
    """
    if k is not None and v is not None:
        kv.write(layer, plan.batch.slot_mapping, k, v)
    return attention_reference(q, kv, layer, plan.batch, scale, window, softcap)


def attention_reference(
    q: Tensor, kv: TorchKV, layer: int, batch: RaggedBatch, scale: float, window: int | None = None, softcap: float | None = None
) -> Tensor:
    """The same, token by token in float64 over a cache already written: slow and plainly right."""
    num_tokens, num_heads, _ = q.shape
    kv_heads, v_dim = kv.v[layer].shape[1:]
    out = torch.zeros(num_tokens, num_heads, v_dim, dtype=torch.float64)
    for row in range(len(batch.seq_lens)):
        start, end = int(batch.query_start_loc[row]), int(batch.query_start_loc[row + 1])
        seq_len, num_causal = int(batch.seq_lens[row]), int(batch.num_causal[row])
        first = seq_len - (end - start)  # place of the row's first token
        tree = first + num_causal  # place of its first tree token
        for token in range(start, end):
            if batch.slot_mapping[token] < 0:
                continue
            own_place, bits = first + token - start, int(batch.tree_mask[token])
            seen: list[int] = []
            for place in range(seq_len):
                if own_place < tree:
                    visible = place <= own_place
                else:
                    visible = place < tree or bool(bits >> (place - tree) & 1)
                position = place if place < tree else int(batch.positions[start + place - first])
                if window is not None:
                    visible = visible and abs(int(batch.positions[token]) - position) < window
                if visible:
                    seen.append(int(batch.block_tables[row, place // batch.block_size]) * batch.block_size + place % batch.block_size)
            keys, values = (x.double().repeat_interleave(num_heads // kv_heads, 1) for x in kv.gather(layer, torch.tensor(seen)))
            scores = torch.einsum("hd,nhd->hn", q[token].double(), keys) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out[token] = torch.einsum("hn,nhd->hd", scores.softmax(-1), values)
    return out.to(q.dtype)
