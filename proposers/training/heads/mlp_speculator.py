"""IBM's MLP speculator in training: a small network that carries the target's last state on from token to token.

Published with two stages (https://arxiv.org/abs/2404.19124): first on ground-truth text, then on text that the target generated.
The stage lies in the data alone: the second is a run of its own, whose trainee begins with the first one's `state_dict()`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, gelu

from ..frozen import FrozenTarget
from ..loop import Losses
from ..packing import Packed
from .base import Head
from .depth_loss import Depth, depth_losses
from .published import write_published

EPS = 1e-6


@dataclass(frozen=True)
class MlpSpeculatorSettings:
    """Sizes. The two tables, [vocabulary, inner_dim] each, are nearly all of the weights."""

    inner_dim: int = 128
    num_positions: int = 5           # tokens guessed (n_predict)
    tied: bool = True                # all positions share their weights; but the first has a projection of its own
    scale_input: bool = True         # the target's state is normed first


class MlpSpeculator(Head):
    """Position i: s = GELU(norm(proj(s) + scale * emb(token i))), its guess is read from s; learned with the text's own tokens."""

    def __init__(self, target: FrozenTarget, settings: MlpSpeculatorSettings | None = None):
        super().__init__(target)
        self.settings = settings = settings or MlpSpeculatorSettings()
        width, inner, count = target.head.shape[1], settings.inner_dim, settings.num_positions
        copies = 1 if settings.tied else count
        inputs, outputs = _leading(target.embedding, inner), _leading(target.head, inner)
        self.embeddings = nn.ParameterList(inputs.clone() for _ in range(copies))
        self.lm_heads = nn.ParameterList(outputs.clone() for _ in range(copies))
        widths = [width, *[inner] * (min(2, count) - 1 if settings.tied else count - 1)]
        self.projections = nn.ModuleList(nn.Linear(width, inner, bias=False) for width in widths)
        self.norms = nn.ModuleList(Norm(inner) for _ in range(copies))

    @property
    def embedding_scale(self) -> float:
        """Of the published weighting: after all positions half of the state's variance is left, embeddings fill up the rest."""
        state_weight = 0.5 ** (0.5 / self.settings.num_positions)
        return math.sqrt((1 - state_weight**2) * self.settings.inner_dim / 2) / state_weight

    def first(self, states: Tensor) -> Tensor:
        """What position 0 reads of the target's states [..., hidden]."""
        return rms_norm(states) / math.sqrt(2) if self.settings.scale_input else states

    def advance(self, position: int, states: Tensor, token_ids: Tensor) -> Tensor:
        """The state that the guess of `position` is read from, [..., inner], from the one before and the token that was read last."""
        embedded = embedding(token_ids, self.embeddings[self._copy(position)])
        mixed = self.projections[min(position, len(self.projections) - 1)](states) + self.embedding_scale * embedded
        return gelu(self.norms[self._copy(position)](mixed))

    def output(self, position: int) -> Tensor:
        """[vocabulary, inner]"""
        return self.lm_heads[self._copy(position)]

    def _copy(self, position: int) -> int:
        return 0 if self.settings.tied else position

    def states(self, batch: Packed) -> Iterator[Tensor]:
        """[N, inner] of each position, with the text's own tokens: what the guess of the token position + 2 places later is read from."""
        state = self.first(self.target(batch).last)
        for position in range(self.settings.num_positions):
            state = self.advance(position, state, batch.ahead(1 + position)[0])
            yield state

    def loss(self, batch: Packed) -> Losses:
        return depth_losses(batch, (Depth(state, self.output(position)) for position, state in enumerate(self.states(batch))))

    def export(self, folder: Path) -> None:
        """Tied tensors are written once, under the first position that has them."""
        settings, (vocab_size, width) = self.settings, self.target.head.shape
        modules = {"embeddings": "emb.{}.weight", "lm_heads": "head.{}.weight", "projections": "proj.{}.{}", "norms": "ln.{}.{}"}
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.state_dict().items():
            module, *rest = name.split(".")
            tensors["speculator." + modules[module].format(*rest)] = tensor
        config = {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "vocab_size": vocab_size,
            "emb_dim": width,
            "inner_dim": settings.inner_dim,
            "n_predict": settings.num_positions,
            "top_k_tokens_per_head": [5, 4, 3, *[1] * settings.num_positions][: settings.num_positions],
            "n_candidates": 5,
            "tie_weights": settings.tied,
            "scale_input": settings.scale_input,
        }
        write_published(folder, config, tensors)


class Norm(nn.Module):
    """Divides by the root mean square, takes no mean off, but has a bias."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x) * self.weight + self.bias


def rms_norm(x: Tensor) -> Tensor:
    """In float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def _leading(table: Tensor, width: int) -> Tensor:
    """[rows, width] the table's leading principal directions, at the published scale: tokens alike in the target begin alike."""
    table = table.detach().float()
    directions = torch.linalg.eigh(table.T @ table).eigenvectors.flip(-1)[:, :width]
    leading = table @ directions
    room = torch.randn(len(table), width - leading.shape[1]) * leading.std()
    leading = torch.cat([leading, room], 1)
    return leading / (leading.std() * math.sqrt(width))
