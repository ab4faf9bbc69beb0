"""DFlash in training: a few layers that fill in a whole block of masks at once, reading the target's own states.

A block is a known token, its anchor, and masks behind it, each of which guesses the token it stands for. Every layer's keys and values of
the text before the anchor are made of the target's tapped states (https://arxiv.org/abs/2602.06036).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding, apply_rotary_pos_emb

from ..block_attention import BLOCKS, Blocks
from ..cross_entropy import linear_cross_entropy
from ..frozen import FrozenTarget, product_type
from ..loop import Losses
from ..packing import Packed
from .base import Head
from .eagle import settings_of
from .published import write_published


@dataclass(frozen=True)
class DFlashSettings:
    """Sizes, and how blocks are learned."""

    num_layers: int = 2
    intermediate_size: int | None = None     # None: the target's
    block_size: int = 8              # the anchor and a mask for each guess
    taps: tuple[int, ...] = ()       # the target's layers whose outputs are read, from 0; (): three, spread as published
    mask_token: int | None = None    # of the target's vocabulary, where texts never have it; None: its padding token, or else its last
    causal: bool = False             # masks see only those before them: guesses then do not depend on how many are asked for
    anchor_share: float = 0.25       # of the learned tokens of a document
    decay: float = 4.0               # the k-th guess counts exp(-(k - 1) / decay); published: 4 for blocks of 8, 7 for 16


class DFlash(Head):
    """Qwen3 layers as wide as the target's, between its embedding and its head; the last norm begins as the target's."""

    def __init__(self, target: FrozenTarget, settings: DFlashSettings | None = None):
        """Raises ValueError for blocks without a guess, and for layers or a mask token that the target does not have."""
        super().__init__(target)
        self.settings = settings or DFlashSettings()
        if self.settings.block_size < 2:
            raise ValueError("block_size must be at least 2: the anchor is no guess")
        if wrong := [tap for tap in self.settings.taps if not 0 <= tap < target.num_layers]:
            raise ValueError(f"taps must be from 0 to {target.num_layers - 1}, the target's layers, not {wrong[0]}")
        config = layer_config(target, self.settings)
        width = config.hidden_size
        self.config = config
        self.taps = tuple(self.settings.taps) or published_taps(target.num_layers)
        self.mask_token = self._mask_token()
        self.fc = nn.Linear(len(self.taps) * width, width, bias=False)
        self.hidden_norm: nn.Module = Qwen3RMSNorm(width, config.rms_norm_eps)
        self.layers = nn.ModuleList(Qwen3DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm: nn.Module = Qwen3RMSNorm(width, config.rms_norm_eps)
        self.norm.load_state_dict(target.model.model.norm.state_dict())
        self.rotary: nn.Module = Qwen3RotaryEmbedding(config)

    def _mask_token(self) -> int:
        size, given, padding = self.target.config.vocab_size, self.settings.mask_token, self.target.config.pad_token_id
        if given is not None and not 0 <= given < size:
            raise ValueError(f"mask_token must be one of the target's {size} tokens, not {given}")
        return next((token for token in (given, padding) if token is not None and 0 <= token < size), size - 1)

    def forward(self, states: Tensor, blocks: Blocks) -> Tensor:
        """States behind the last norm, [R, hidden], which the target's head reads; those of anchors mean nothing.

        states: [N, taps * hidden], the target's at each token of the text.
        """
        batch = blocks.batch
        context = self.hidden_norm(self.fc(states))[None]
        masks = torch.full_like(blocks.numbers, self.mask_token)
        token_ids = torch.where(blocks.offsets == 0, batch.token_ids[blocks.places][blocks.numbers], masks)
        hidden = self.target.embed(token_ids)[None]
        rope = self.rotary(hidden, blocks.positions[None])
        text_rope = self.rotary(hidden, batch.positions[None])
        for layer in self.layers:
            hidden = self.through(layer, hidden, position_embeddings=rope, context=self._entries(layer, context, text_rope), blocks=blocks)
        return self.norm(hidden)[0]

    def through(self, layer: Any, hidden: Tensor, **more: Any) -> Tensor:
        """[1, R, hidden] behind a layer."""
        return layer(hidden, **more)

    def _entries(self, layer: Any, context: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """A layer's keys and values of the text, [1, key heads, N, D]: straight from the context, which goes through no layer."""
        attention = layer.self_attn
        keys, values = (
            project(context).unflatten(-1, (-1, self.config.head_dim)) for project in (attention.k_proj, attention.v_proj))
        keys = attention.k_norm(keys).transpose(1, 2)
        return apply_rotary_pos_emb(keys, keys, *rope)[1], values.transpose(1, 2)

    def anchors(self, batch: Packed) -> Blocks:
        """Blocks at random tokens before learned ones, a share of those of each document.

        All are whole: in blocks cut at a document's end, masks would see how near it is.
        """
        chance = torch.rand(len(batch.token_ids), generator=torch.Generator().manual_seed(batch.number))
        places: list[Tensor] = []
        candidates = batch.ahead(1)[1].cpu() > 0
        for start, end in zip(batch.bounds, batch.bounds[1:], strict=False):
            possible = start + candidates[start:end].nonzero()[:, 0]
            wanted = min(len(possible), max(1, round(self.settings.anchor_share * len(possible))))
            places.append(possible[chance[possible].topk(wanted).indices].sort().values)
        found = torch.cat(places).to(batch.token_ids.device)
        return Blocks(batch, found, torch.full_like(found, self.settings.block_size), self.settings.causal)

    def states(self, batch: Packed) -> Tensor:
        """What `forward` reads of the target, [N, taps * hidden]."""
        layers = self.target(batch, self.taps).layers
        return torch.cat([layers[tap] for tap in self.taps], -1)

    def loss(self, batch: Packed) -> Losses:
        blocks = self.anchors(batch)
        hidden = self(self.states(batch), blocks)
        labels, learned = blocks.ahead(0)
        weights = learned * torch.exp((1 - blocks.offsets) / self.settings.decay)
        rows = (learned * blocks.offsets).nonzero()[:, 0]
        total, right = self.cross_entropy(hidden, labels, rows, weights[rows])
        weight = float(weights[rows].sum())
        metrics = {"loss": (float(total.detach()), weight)}
        for depth in range(1, self.settings.block_size):
            tried = blocks.offsets[rows] == depth
            metrics[f"accuracy_{depth}"] = float((right[tried] > 0).sum()), float(tried.sum())
        return Losses(total, weight, metrics)

    def cross_entropy(self, hidden: Tensor, labels: Tensor, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """As `linear_cross_entropy`, of the slots `rows`. hidden [R, hidden]: of `forward`; labels [R]: the tokens that slots stand for."""
        return scores_loss(hidden[rows], self.target.head, labels[rows], weights)

    def published(self) -> dict[str, Any]:
        """Settings of config.json beside those of the layers."""
        inner = {"mask_token_id": self.mask_token, "target_layer_ids": list(self.taps)}
        return {
            "architectures": ["DFlashDraftModel"],
            "block_size": self.settings.block_size,
            "dflash_config": {**inner, "causal": True} if self.settings.causal else inner,
        }

    def export(self, folder: Path) -> None:
        """As z-lab publishes it: no embedding and no head, which are the target's."""
        config = {
            **self.config.to_dict(),
            "rope_theta": (self.config.rope_parameters or {}).get("rope_theta"),
            "torch_dtype": "bfloat16",
            "num_target_layers": self.target.num_layers,
            **self.published(),
        }
        write_published(folder, config, self.state_dict())


def scores_loss(states: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """`linear_cross_entropy`, its products in the type that pays where the states lie."""
    dtype = product_type(states)
    return linear_cross_entropy(states.to(dtype), head.to(dtype), labels, weights)


def layer_config(target: FrozenTarget, settings: DFlashSettings) -> Qwen3Config:
    """Of layers as wide as the target's, with as many heads and its rotary base."""
    config = target.config
    layers = Qwen3Config(
        **settings_of(config),
        intermediate_size=settings.intermediate_size or config.intermediate_size,
        num_hidden_layers=settings.num_layers,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        tie_word_embeddings=config.tie_word_embeddings,
    )
    layers._attn_implementation = BLOCKS
    return layers


def published_taps(num_layers: int) -> tuple[int, ...]:
    """Three layers from the second to the third last, fewer of a very small target: 8 -> (1, 3, 5), 36 -> (1, 17, 33)."""
    spread = (round(1 + i * (num_layers - 4) / 2) for i in range(3))
    return tuple(sorted({min(max(tap, 0), num_layers - 1) for tap in spread}))
