"""DFlash 2 in training: DFlash whose slots see the one before, and whose guesses know each other (Inco AI and z-lab, August 2026).

Convolutions around each sublayer begin as nothing at all, the selector too: at first it is a DFlash. The selector learns with the true
token before each guess, over the whole vocabulary: its score <A[p] * (P h), B[c]> is one more product beside the target's head.

Where only the sum of both scores is learned, a place's own scores need not know which tokens are good, and those that are chosen among
when it serves lack the right one too often: so these are learned by themselves as well.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..frozen import FrozenTarget
from .dflash import DFlash, DFlashSettings, scores_loss


@dataclass(frozen=True)
class DFlash2Settings(DFlashSettings):
    """What it has besides."""

    conv_kernel_size: int = 2        # slots that a convolution reads: its own and those just before it
    conv_group_size: int = 16        # columns that share a kernel
    selector_rank: int = 64          # published: 256, beside vocabularies of 150,000 tokens and more
    selector_top_k: int = 16         # guesses of a place among which the selector chooses
    own_share: float = 0.5           # of the loss: a place's own scores alone


class Convolution(nn.Module):
    """One before and one behind a sublayer, kernels of both made of its input: see `LocalConv` of kernels/program.py."""

    def __init__(self, width: int, taps: int, group_size: int) -> None:
        super().__init__()
        self.taps, self.groups = taps, width // group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, width))
        self.base_kernel.data[:, 0] = 1.0
        self.kernel_projection = nn.Linear(width, 2 * taps * self.groups, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def kernels(self, x: Tensor) -> Tensor:
        """[1, R, width] -> [2, taps, 1, R, groups, 1]"""
        return self.kernel_projection(x).unflatten(-1, (2, self.taps, self.groups, 1)).permute(2, 3, 0, 1, 4, 5)

    def forward(self, x: Tensor, kernels: Tensor, side: int, offsets: Tensor) -> Tensor:
        """[1, R, width], blocks side by side. offsets [R]: of each slot in its block."""
        columns = x.unflatten(-1, (self.groups, -1))
        fixed = self.base_kernel[side].unflatten(-1, (self.groups, -1))
        mixed = (fixed[0] + kernels[side, 0]) * columns
        for tap in range(1, self.taps):
            earlier = nn.functional.pad(columns, (0, 0, 0, 0, tap, 0))[:, : x.shape[1]].masked_fill((offsets < tap)[:, None, None], 0.0)
            mixed = mixed + (fixed[tap] + kernels[side, tap]) * earlier
        return mixed.flatten(-2)


class Selector(nn.Module):
    """A, B and P: named as they are published."""

    def __init__(self, width: int, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)


class DFlash2(DFlash):
    """A DFlash and both additions."""

    settings: DFlash2Settings  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, target: FrozenTarget, settings: DFlash2Settings | None = None):
        """Raises ValueError as DFlash does, for groups that do not divide the width, and for a selector that has no share of the loss."""
        settings = settings or DFlash2Settings()
        if not 0 <= settings.own_share < 1:
            raise ValueError(f"own_share must be from 0 to below 1, not {settings.own_share}")
        super().__init__(target, settings)
        width = self.config.hidden_size
        if width % settings.conv_group_size:
            raise ValueError(f"conv_group_size must divide the target's width, {width}, and {settings.conv_group_size} does not")
        for layer in self.layers:
            for name in ("attention_conv", "mlp_conv"):
                layer.register_module(name, Convolution(width, settings.conv_kernel_size, settings.conv_group_size))
        self.candidate_selector = Selector(width, target.config.vocab_size, settings.selector_rank)

    def through(self, layer: Any, hidden: Tensor, **more: Any) -> Tensor:
        offsets = more["blocks"].offsets
        x = layer.input_layernorm(hidden)
        kernels = layer.attention_conv.kernels(x)
        x = layer.self_attn(layer.attention_conv(x, kernels, 0, offsets), attention_mask=None, **more)[0]
        hidden = hidden + layer.attention_conv(x, kernels, 1, offsets)
        x = layer.post_attention_layernorm(hidden)
        kernels = layer.mlp_conv.kernels(x)
        return hidden + layer.mlp_conv(layer.mlp(layer.mlp_conv(x, kernels, 0, offsets)), kernels, 1, offsets)

    def cross_entropy(self, hidden: Tensor, labels: Tensor, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        selector, share, head = self.candidate_selector, self.settings.own_share, self.target.head
        before = labels.roll(1)[rows]  # a block's slots stand side by side
        hidden, labels = hidden[rows], labels[rows]
        context = selector.predecessor_codebook[before] * selector.hidden_projection(hidden)
        chosen, right = scores_loss(
            torch.cat([hidden, context], -1), torch.cat([head, selector.successor_codebook], -1), labels, weights * (1 - share)
        )
        own, _ = scores_loss(hidden, head, labels, weights * share)
        return chosen + own, right

    def published(self) -> dict[str, Any]:
        shared, settings = super().published(), self.settings
        more = {"conv_kernel_size": settings.conv_kernel_size, "conv_group_size": settings.conv_group_size}
        more |= {"selector_rank": settings.selector_rank, "selector_top_k": settings.selector_top_k}
        return shared | {"architectures": ["DFlash2DraftModel"], "dflash_config": {**shared["dflash_config"], **more}}
