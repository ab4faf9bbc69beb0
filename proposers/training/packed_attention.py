"""Causal attention over packed documents: many texts in one row of tokens, none sees another. Owns the kernel, not the packing.

Texts of a few hundred tokens packed end to end cost no padding and no products that a mask throws away: each document's scores
are taken by themselves, in blocks of queries. The backward pass is written out because the stored probabilities are all
it needs; at these lengths that is twice as fast on a CPU as the fused kernels, which are built for long rows.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "foretoken_packed"            # of the implementation, in transformers' `attn_implementation`
BLOCK = 256                          # queries whose scores are held at a time


class _PackedAttention(torch.autograd.Function):
    """q [KV, G, N, D], k and v [KV, N, D] -> [KV, G, N, D], where G query heads share a key head."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bounds: Sequence[int], scale: float) -> Tensor:
        out = torch.empty_like(q)
        saved: list[Tensor] = []
        for first, block, end in _blocks(bounds):
            probs = _scores(q[:, :, block:end], k[:, first:end], scale, end - block).softmax(-1)
            rows = torch.bmm(probs, v[:, first:end])
            out[:, :, block:end] = rows.unflatten(1, (q.shape[1], end - block))
            saved.append(probs)
        ctx.save_for_backward(q, k, v, *saved)
        ctx.bounds, ctx.scale = bounds, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, *saved = ctx.saved_tensors
        (grad,) = grads
        q_grad, k_grad, v_grad = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for (first, block, end), probs in zip(_blocks(ctx.bounds), saved, strict=True):
            rows = grad[:, :, block:end].flatten(1, 2)
            v_grad[:, first:end] += probs.transpose(1, 2) @ rows
            scores_grad = torch.ops.aten._softmax_backward_data(rows @ v[:, first:end].transpose(1, 2), probs, -1, probs.dtype)
            scores_grad *= ctx.scale
            q_grad[:, :, block:end] = (scores_grad @ k[:, first:end]).unflatten(1, (q.shape[1], end - block))
            k_grad[:, first:end] += scores_grad.transpose(1, 2) @ q[:, :, block:end].flatten(1, 2)
        return q_grad, k_grad, v_grad, None, None


def _blocks(bounds: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first key, first query, end of both) of every block of every document."""
    return [
        (start, block, min(block + BLOCK, end))
        for start, end in zip(bounds, bounds[1:], strict=False)
        for block in range(start, end, BLOCK)
    ]


def _scores(q: Tensor, k: Tensor, scale: float, queries: int) -> Tensor:
    """Masked scores [KV, G * queries, keys]; the last query sees every key."""
    mask = _mask(queries, k.shape[1], q.shape[1], q.dtype)
    return torch.baddbmm(mask, q.flatten(1, 2), k.transpose(1, 2), alpha=scale)


@lru_cache(maxsize=1024)
def _mask(queries: int, keys: int, groups: int, dtype: torch.dtype) -> Tensor:
    one = torch.full((queries, keys), float("-inf"), dtype=dtype).triu(keys - queries + 1)
    return one.repeat(groups, 1)


def packed_attention(
    module: nn.Module,
    query: Tensor,                   # [1, heads, N, D]
    key: Tensor,                     # [1, key heads, N, D]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    bounds: Sequence[int],           # where documents begin, and N
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function of a transformers model called with `bounds`; returns [1, N, heads, D]."""
    groups = query.shape[1] // key.shape[1]
    q = query[0].to(value.dtype).unflatten(0, (key.shape[1], groups))
    out = _PackedAttention.apply(q, key[0].to(value.dtype), value[0], bounds, scaling or query.shape[-1] ** -0.5)
    return out.flatten(0, 1).transpose(0, 1)[None], None


AttentionInterface.register(NAME, packed_attention)
