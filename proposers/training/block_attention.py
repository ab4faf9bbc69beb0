"""Attention of guesses made side by side in blocks behind a text, for PARD's mask tokens and DFlash's blocks.

A block stands at a place of a packed document: its slots see the document's tokens before that place and one another, all or only
earlier ones, never another block. Scores are taken for whole blocks of one document at a time; the backward pass is written out, as in
packed_attention.py, because the stored probabilities are all it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from .packed_attention import packed_attention
from .packing import Packed

TEXT_AND_BLOCKS = "foretoken_text_and_blocks"        # of the implementations, in transformers' `attn_implementation`
BLOCKS = "foretoken_blocks"
SLOTS = 256                          # about so many queries' scores are held at a time


@dataclass(frozen=True)
class Blocks:
    """The blocks of one batch, R slots in all, a block's side by side."""

    batch: Packed
    places: Tensor                   # [B] int64, ascending: the token each block's first slot stands for; it sees those before
    lengths: Tensor                  # [B] int64, at least 1: slots, one for each token from `places` on, perhaps past the document's end
    causal: bool                     # slots see themselves and earlier slots of their block, not later ones

    @cached_property
    def numbers(self) -> Tensor:
        """[R] int64: the block of each slot."""
        return torch.arange(len(self.places), device=self.places.device).repeat_interleave(self.lengths)

    @cached_property
    def offsets(self) -> Tensor:
        """[R] int64: each slot's place in its block, from 0."""
        return torch.arange(len(self.numbers), device=self.places.device) - (self.lengths.cumsum(0) - self.lengths)[self.numbers]

    @cached_property
    def positions(self) -> Tensor:
        """[R] int64: each slot's position in its document."""
        return self.batch.positions[self.places][self.numbers] + self.offsets

    def ahead(self, distance: int) -> tuple[Tensor, Tensor]:
        """The token `distance` places behind each slot's own, [R] int64, and [R] float32: 1 where the document has it, to be learned."""
        reach = range(int(self.lengths.max())) if len(self.lengths) else range(1)
        tokens, learned = zip(*(self.batch.ahead(distance + offset) for offset in reach), strict=True)
        slots = self.offsets, self.places[self.numbers]
        return torch.stack(tokens)[slots], torch.stack(learned)[slots]

    def parts(self, dtype: torch.dtype) -> list[Part]:
        """All slots, in order."""
        if dtype not in self._parts:
            self._parts[dtype] = [self._part(*part, dtype) for part in self._split()]
        return self._parts[dtype]

    @cached_property
    def _parts(self) -> dict[torch.dtype, list[Part]]:
        return {}

    def _split(self) -> list[tuple[int, int, int]]:
        """(where the document begins, first block, end of blocks) of each part."""
        lengths, parts = self.lengths.tolist(), []
        cuts = torch.searchsorted(self.places.cpu(), torch.tensor(self.batch.bounds)).tolist()
        for first, begin, end in zip(self.batch.bounds, cuts, cuts[1:], strict=False):
            slots = 0
            for block in range(begin, end):
                if slots + lengths[block] > SLOTS and slots:
                    parts.append((first, begin, block))
                    begin, slots = block, 0
                slots += lengths[block]
            if slots:
                parts.append((first, begin, end))
        return parts

    def _part(self, first: int, begin: int, end: int, dtype: torch.dtype) -> Part:
        last = int(self.places[end - 1])
        start, stop = (int(self.lengths[:block].sum()) for block in (begin, end))
        numbers, offsets = self.numbers[start:stop], self.offsets[start:stop]
        hidden = numbers[:, None] != numbers
        if self.causal:
            hidden |= offsets[:, None] < offsets
        behind = torch.arange(first, last, device=numbers.device) >= self.places[numbers, None]
        seen = torch.cat([behind, hidden], 1)
        return Part(first, last, start, stop, torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(seen, float("-inf")))


@dataclass(frozen=True)
class Part:
    """Slots start:end, which see tokens first:last and each other as `mask` says."""

    first: int
    last: int
    start: int
    end: int
    mask: Tensor                     # [slots, tokens + slots]: 0, or -inf for what is not seen

    def both(self, tokens: Tensor, slots: Tensor) -> Tensor:
        """[KV, N, D] and [KV, R, D] -> what this part's slots see of them, [KV, tokens + slots, D]."""
        return torch.cat([tokens[:, self.first : self.last], slots[:, self.start : self.end]], 1)


class _BlockAttention(torch.autograd.Function):
    """q [KV, G, R, D] of the slots; k, v [KV, N, D] of the text; own_k, own_v [KV, R, D] of the slots -> [KV, G, R, D]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, parts: Sequence[Part], scale: float
    ) -> Tensor:
        out = torch.empty_like(q)
        saved: list[Tensor] = []
        for part in parts:
            rows, mask = q[:, :, part.start : part.end].flatten(1, 2), part.mask.repeat(q.shape[1], 1)
            probs = torch.baddbmm(mask, rows, part.both(k, own_k).transpose(1, 2), alpha=scale).softmax(-1)
            out[:, :, part.start : part.end] = torch.bmm(probs, part.both(v, own_v)).unflatten(1, (q.shape[1], -1))
            saved.append(probs)
        ctx.save_for_backward(q, k, v, own_k, own_v, *saved)
        ctx.parts, ctx.scale = parts, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, own_k, own_v, *saved = ctx.saved_tensors
        (grad,) = grads
        q_grad, k_grad, v_grad = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        own_k_grad, own_v_grad = torch.empty_like(own_k), torch.empty_like(own_v)
        for part, probs in zip(ctx.parts, saved, strict=True):
            tokens, slots, seen = slice(part.first, part.last), slice(part.start, part.end), part.last - part.first
            rows = grad[:, :, slots].flatten(1, 2)
            values = probs.transpose(1, 2) @ rows
            v_grad[:, tokens] += values[:, :seen]
            own_v_grad[:, slots] = values[:, seen:]
            probs_grad = rows @ part.both(v, own_v).transpose(1, 2)
            scores_grad = torch.ops.aten._softmax_backward_data(probs_grad, probs, -1, probs.dtype)
            scores_grad *= ctx.scale
            q_grad[:, :, slots] = (scores_grad @ part.both(k, own_k)).unflatten(1, (q.shape[1], -1))
            keys = scores_grad.transpose(1, 2) @ q[:, :, slots].flatten(1, 2)
            k_grad[:, tokens] += keys[:, :seen]
            own_k_grad[:, slots] = keys[:, seen:]
        return q_grad, k_grad, v_grad, own_k_grad, own_v_grad, None, None


def block_attention(
    module: nn.Module,
    query: Tensor,                   # [1, heads, R, D]
    key: Tensor,                     # [1, key heads, R, D]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    context: tuple[Tensor, Tensor],  # keys and values of the text, [1, key heads, N, D]
    blocks: Blocks,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function of a transformers layer that is called with blocks alone; returns [1, R, heads, D]."""
    k, v = context
    dtype = value.dtype
    q = query[0].to(dtype).unflatten(0, (key.shape[1], -1))
    scale = scaling or query.shape[-1] ** -0.5
    out = _BlockAttention.apply(q, k[0].to(dtype), v[0].to(dtype), key[0].to(dtype), value[0], blocks.parts(dtype), scale)
    return out.flatten(0, 1).transpose(0, 1)[None], None


def text_and_block_attention(
    module: nn.Module,
    query: Tensor,                   # [1, heads, N + R, D]
    key: Tensor,                     # [1, key heads, N + R, D]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    blocks: Blocks,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function of a transformers model called with the N packed tokens and the slots behind them; [1, N + R, heads, D].

    The text does not see the slots.
    """
    size = len(blocks.batch.token_ids)
    (text_q, q), (text_k, k), (text_v, v) = (x.tensor_split([size], 2) for x in (query, key, value))
    text, _none = packed_attention(module, text_q, text_k, text_v, None, scaling, bounds=blocks.batch.bounds)
    slots, _none = block_attention(module, q, k, v, None, scaling, context=(text_k, text_v), blocks=blocks)
    return torch.cat([text, slots], 1), None


AttentionInterface.register(BLOCKS, block_attention)
AttentionInterface.register(TEXT_AND_BLOCKS, text_and_block_attention)
