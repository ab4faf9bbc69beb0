"""Networks written out plainly over random weights, which have names: what the references of several kinds of drafters do alike."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu


class RandomWeights:
    """Everything is random, norms too, so that nothing can be forgotten unnoticed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, Tensor] = {}

    def matrix(self, name: str, *shape: int, size: float = 1.0) -> None:
        noise = torch.randn(shape, generator=self.generator) * size
        self.tensors[name] = 1 + 0.3 * noise if "norm" in name else noise * (0.5 if len(shape) == 1 else shape[-1] ** -0.5)

    def mlp(self, layer: str, hidden: int, intermediate: int) -> None:
        for part in ("gate", "up"):
            self.matrix(f"{layer}.mlp.{part}_proj.weight", intermediate, hidden)
        self.matrix(f"{layer}.mlp.down_proj.weight", hidden, intermediate)

    def vocabulary(self, vocab: int, count: int, token_ids: Sequence[int]) -> None:
        """The maps of a draft vocabulary; token_ids () = drawn."""
        drawn = torch.randperm(vocab, generator=self.generator)[:count].sort().values
        ids = torch.tensor(token_ids) if token_ids else drawn
        self.tensors["d2t"] = ids - torch.arange(count)
        self.tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)


class PlainNetwork:
    def __init__(self, weights: dict[str, Tensor], eps: float) -> None:
        self.weights, self._eps = weights, eps

    def _norm(self, name: str, x: Tensor, eps: float | None = None) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + (eps or self._eps)).sqrt() * self.weights[f"{name}.weight"]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.weights[f"{name}.weight"].T
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y

    def _mlp(self, layer: str, y: Tensor) -> Tensor:
        gated = silu(self._linear(f"{layer}.mlp.gate_proj", y)) * self._linear(f"{layer}.mlp.up_proj", y)
        return self._linear(f"{layer}.mlp.down_proj", gated)

    def _by_token(self, probs: Tensor, vocab: int) -> Tensor:
        """[n, vocab] of probabilities of a draft vocabulary."""
        if "d2t" not in self.weights:
            return probs
        spread = torch.zeros(len(probs), vocab)
        spread[:, torch.arange(probs.shape[-1]) + self.weights["d2t"]] = probs
        return spread


def turned(x: Tensor, angles: Tensor, pairs: bool = False) -> Tensor:
    """x [n, heads, dim] by angles [n, dim / 2]. pairs: dimensions 2 i and 2 i + 1 turn together, else i and i + dim / 2."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = (x[..., ::2], x[..., 1::2]) if pairs else x.chunk(2, -1)
    found = a * cos - b * sin, b * cos + a * sin
    return torch.stack(found, -1).flatten(-2) if pairs else torch.cat(found, -1)


def attended(q: Tensor, k: Tensor, v: Tensor, scale: float, unseen: Tensor | None = None) -> Tensor:
    """[n, heads * dim] of q, k, v [n, heads, dim]; unseen: [queries, keys]."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if unseen is not None:
        scores = scores.masked_fill(unseen, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
