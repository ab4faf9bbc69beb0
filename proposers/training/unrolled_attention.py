"""Attention of a draft layer that is unrolled in training: what each of its guesses will attend to when it drafts.

Step 0 has the target's states of every token, as a drafter's cache has them of a known text. A later step goes on from some of the
tokens: it attends to step 0 up to its token and then to its own chain, never to other tokens' guesses (training-time test,
https://arxiv.org/abs/2503.01840, appendix). Texts are packed: none sees another. The backward pass is written out, as in
packed_attention.py, because the stored probabilities are all it needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface

from .packed_attention import packed_attention

NAME = "foretoken_unrolled"          # of the implementation, in transformers' `attn_implementation`
BLOCK = 256                          # chains whose scores are held at a time


class Unroll:
    """The chains of one batch in one layer, and the keys and values of the steps so far, which the attention itself adds."""

    def __init__(self, bounds: Sequence[int], starts: Tensor):
        """bounds: where documents begin, and N. starts: [R] int64, ascending: the tokens that steps behind step 0 go on from."""
        self.bounds, self.starts = bounds, starts
        self.steps: list[tuple[Tensor, Tensor]] = []         # [KV, N, D] of step 0, [KV, R, D] of later ones
        self.blocks: list[Block] = []


@dataclass(frozen=True)
class Block:
    """Chains of one document: rows start:end of the R, which attend to tokens first:last."""

    first: int
    last: int
    start: int
    end: int
    mask: Tensor                     # [chains, tokens]: 0, or -inf at tokens behind the chain's start


class _Unrolled(torch.autograd.Function):
    """q [KV, G, R, D]; k, v [KV, N, D] of step 0; own_k, own_v [KV, R, S, D] of the later steps, the last one's included."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, blocks: Sequence[Block], scale: float
    ) -> Tensor:
        out, length = torch.empty_like(q), own_k.shape[2]
        own_scores = _per_chain(q, own_k.transpose(2, 3)).mul_(scale)
        own_probs = torch.empty_like(own_scores)
        saved: list[Tensor] = []
        for block in blocks:
            chains, tokens = slice(block.start, block.end), slice(block.first, block.last)
            # The chain's columns are zero in this product, and filled in behind it.
            mask = pad(block.mask, (0, length)).repeat(q.shape[1], 1)
            scores = torch.baddbmm(mask, q[:, :, chains].flatten(1, 2), _longer(k[:, tokens], length).transpose(1, 2), alpha=scale)
            scores[..., -length:] = own_scores[:, :, chains].flatten(1, 2)
            probs = scores.softmax(-1)
            own_probs[:, :, chains] = _split(probs[..., -length:], q)
            out[:, :, chains] = _split(torch.bmm(probs, _longer(v[:, tokens], length)), q)
            saved.append(probs)
        out += _per_chain(own_probs, own_v)
        ctx.save_for_backward(q, k, v, own_k, own_v, own_probs, *saved)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, own_k, own_v, own_probs, *saved = ctx.saved_tensors
        (grad,) = grads
        length = own_k.shape[2]
        q_grad, k_grad, v_grad = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        own_probs_grad = _per_chain(grad, own_v.transpose(2, 3))
        own_scores_grad = torch.empty_like(own_probs_grad)
        for block, probs in zip(ctx.blocks, saved, strict=True):
            chains, tokens = slice(block.start, block.end), slice(block.first, block.last)
            rows = grad[:, :, chains].flatten(1, 2)
            v_grad[:, tokens] += (probs.transpose(1, 2) @ rows)[:, :-length]
            probs_grad = rows @ _longer(v[:, tokens], length).transpose(1, 2)
            probs_grad[..., -length:] = own_probs_grad[:, :, chains].flatten(1, 2)
            scores_grad = torch.ops.aten._softmax_backward_data(probs_grad, probs, -1, probs.dtype)
            scores_grad *= ctx.scale
            own_scores_grad[:, :, chains] = _split(scores_grad[..., -length:], q)
            q_grad[:, :, chains] = _split(scores_grad @ _longer(k[:, tokens], length), q)
            k_grad[:, tokens] += (scores_grad.transpose(1, 2) @ q[:, :, chains].flatten(1, 2))[:, :-length]
        q_grad += _per_chain(own_scores_grad, own_k)
        own_k_grad, own_v_grad = _over_groups(own_scores_grad, q), _over_groups(own_probs, grad)
        return q_grad, k_grad, v_grad, own_k_grad, own_v_grad, None, None


def _per_chain(rows: Tensor, matrices: Tensor) -> Tensor:
    """rows [KV, G, R, A] times each chain's matrix [KV, R, A, B] -> [KV, G, R, B]."""
    return (rows.transpose(1, 2) @ matrices).transpose(1, 2)


def _over_groups(one: Tensor, other: Tensor) -> Tensor:
    """[KV, G, R, A] and [KV, G, R, B] -> [KV, R, A, B]."""
    return one.permute(0, 2, 3, 1) @ other.transpose(1, 2)


def _longer(rows: Tensor, length: int) -> Tensor:
    return pad(rows, (0, 0, 0, length))


def _split(rows: Tensor, like: Tensor) -> Tensor:
    """[KV, G * chains, X] -> [KV, G, chains, X]"""
    return rows.unflatten(1, (like.shape[1], -1))


def _blocks(unroll: Unroll, dtype: torch.dtype) -> list[Block]:
    blocks: list[Block] = []
    cuts = torch.searchsorted(unroll.starts.cpu(), torch.tensor(unroll.bounds)).tolist()
    for first, begin, stop in zip(unroll.bounds, cuts, cuts[1:], strict=False):
        for start in range(begin, stop, BLOCK):
            end = min(start + BLOCK, stop)
            places = unroll.starts[start:end]
            last = int(places[-1]) + 1
            behind = torch.arange(first, last, device=places.device) > places[:, None]
            mask = torch.zeros(behind.shape, dtype=dtype, device=places.device).masked_fill_(behind, float("-inf"))
            blocks.append(Block(first, last, start, end, mask))
    return blocks


def unrolled_attention(
    module: nn.Module,
    query: Tensor,                   # [1, heads, N, D] in step 0, [1, heads, R, D] in later ones
    key: Tensor,                     # [1, key heads, N or R, D]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    unroll: Unroll,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function of a transformers layer called with `unroll`; returns [1, N or R, heads, D]."""
    scale = scaling or query.shape[-1] ** -0.5
    unroll.steps.append((key[0].to(value.dtype), value[0]))
    if len(unroll.steps) == 1:
        return packed_attention(module, query, key, value, attention_mask, scale, bounds=unroll.bounds)
    q = query[0].to(value.dtype).unflatten(0, (key.shape[1], -1))
    unroll.blocks = unroll.blocks or _blocks(unroll, q.dtype)
    (k, v), *own = unroll.steps
    own_k, own_v = (torch.stack(parts, 2) for parts in zip(*own, strict=True))
    out = _Unrolled.apply(q, k, v, own_k, own_v, unroll.blocks, scale)
    return out.flatten(0, 1).transpose(0, 1)[None], None


AttentionInterface.register(NAME, unrolled_attention)
