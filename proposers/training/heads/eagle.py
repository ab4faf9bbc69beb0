"""EAGLE-1 in training: one layer that goes on from the target's last state, learning its next states and with them its tokens.

Slot i reads the target's state of token i and token i + 1, and makes the state of token i + 1, which the target's own head reads
(https://arxiv.org/abs/2401.15077). Trained one step deep, as published; deeper guesses are only measured, on held-out text.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from ..cross_entropy import linear_cross_entropy
from ..frozen import FrozenTarget, product_type
from ..loop import Losses
from ..packing import Packed
from ..unrolled_attention import NAME, Unroll
from .base import Head
from .published import write_published

MEASURED = 5                         # guesses in a row whose accuracy is measured


@dataclass(frozen=True)
class EagleSettings:
    """The published weights of both losses and the noise on what is read; `intermediate_size=None`: the target's."""

    intermediate_size: int | None = None
    state_weight: float = 1.0        # of the smooth L1 distance between states
    token_weight: float = 0.1        # of the cross-entropy with the target's probabilities
    noise: float = 0.2               # states are read with uniform noise this wide, times 512 / (tokens of the document)


class Eagle(Head):
    """fc over [embedding; state], and a Llama layer without its first norm."""

    def __init__(self, target: FrozenTarget, settings: EagleSettings | None = None):
        super().__init__(target)
        self.settings = settings or EagleSettings()
        self.layer_config = layer_config(target, self.settings.intermediate_size)
        width = self.layer_config.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layer: Any = LlamaDecoderLayer(self.layer_config, 0)
        self.layer.input_layernorm = nn.Identity()
        self.rotary: nn.Module = LlamaRotaryEmbedding(self.layer_config)

    def forward(self, states: Tensor, token_ids: Tensor, positions: Tensor, unroll: Unroll) -> Tensor:
        """The states of `token_ids`, [N, hidden].

        states: [N, hidden], of the tokens before, the target's or this head's own; positions: [N], of those.
        unroll: of the steps before on the same tokens; this one is added.
        """
        embedded = self.target.embed(token_ids)
        read = self.fc(torch.cat([embedded, states.to(embedded.dtype)], -1))[None]
        return self.layer(read, position_embeddings=self.rotary(read, positions[None]), unroll=unroll)[0]

    def loss(self, batch: Packed) -> Losses:
        trains = torch.is_grad_enabled()
        last, head = self.target(batch).last, self.target.head.to(product_type(self.target.head))
        read = last + self._noise(batch, last) if trains else last
        totals: list[Tensor] = []
        metrics: dict[str, tuple[float, float]] = {}
        for depth, (starts, state) in enumerate(states_by_depth(self, batch, read, 1 if trains else MEASURED), 1):
            labels, weights = batch.ahead(1 + depth)
            rows = (weights[starts] > 0).nonzero()[:, 0]
            tokens, guessed = starts[rows], state[rows]
            wanted = last[tokens + depth]
            total, right = linear_cross_entropy(
                guessed.to(product_type(guessed)), head, labels[tokens], weights[tokens], self.target.teacher(wanted, head, 1.0))
            distance = smooth_l1_loss(guessed.float(), wanted.float(), reduction="none").mean(-1).sum()
            totals.append(self.settings.state_weight * distance + self.settings.token_weight * total)
            metrics[f"accuracy_{depth}"] = float(right.sum()), float(len(rows))
        weight = metrics["accuracy_1"][1]
        return Losses(totals[0], weight, {"loss": (float(totals[0].detach()), weight), **metrics})

    def _noise(self, batch: Packed, like: Tensor) -> Tensor:
        """Documents shorter than the published 512 get no more of it than one of 512 does."""
        lengths = torch.tensor(batch.bounds).diff()
        widths = self.settings.noise * (512 / lengths).clamp_max(1.0).repeat_interleave(lengths)
        noise = torch.rand(like.shape, generator=torch.Generator().manual_seed(batch.number)) - 0.5
        return (noise * widths[:, None]).to(like)

    def export(self, folder: Path) -> None:
        """Embedding and head are left out: they are the target's."""
        config = {"architectures": ["LlamaForCausalLMEagle"], **published_config(self.layer_config), "bias": False}
        write_published(folder, config, {name.replace("layer.", "layers.0.", 1): x for name, x in self.state_dict().items()})


def layer_config(target: FrozenTarget, intermediate_size: int | None) -> LlamaConfig:
    """Of a Llama layer as wide as the target's, with as many heads."""
    config = target.config
    layer = LlamaConfig(
        **settings_of(config),
        intermediate_size=intermediate_size or config.intermediate_size,
        num_hidden_layers=1,
        head_dim=getattr(config, "head_dim", None),          # an optional setting of Hugging Face's
    )
    layer._attn_implementation = NAME
    return layer


def settings_of(config: Any) -> dict[str, Any]:
    """What a drafter's layers have from the target's config."""
    same = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps")
    base = (config.rope_parameters or {}).get("rope_theta", 10000.0)
    return {**{name: getattr(config, name) for name in same}, "rope_parameters": {"rope_type": "default", "rope_theta": base}}


def published_config(config: LlamaConfig) -> dict[str, Any]:
    """What drafters' config.json says of their layer, in every layout."""
    names = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("max_position_embeddings", "rms_norm_eps", "hidden_act"),
    )
    settings = {name: getattr(config, name) for name in names}
    rope: Any = config.rope_parameters
    same = {"rope_theta": rope["rope_theta"], "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    return {"model_type": "llama", **settings, **same}


def states_by_depth(
    head: Callable[[Tensor, Tensor, Tensor, Unroll], Tensor], batch: Packed, state: Tensor, depths: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each depth: the tokens [R] that its guesses begin at, and the states [R, hidden] they are read from.

    head: (states, the tokens that each chose, positions of the states, unroll) -> the states that follow. state: [N, hidden], the
    target's. The first depth has all tokens, later ones those whose guesses are learned, behind the text's own tokens.
    """
    starts, positions = torch.arange(len(state), device=state.device), batch.positions
    unroll = Unroll(batch.bounds, _chain_starts(batch, depths))
    for depth in range(1, 1 + depths):
        state = head(state, batch.ahead(depth)[0][starts], positions[starts] + depth - 1, unroll)
        yield starts, state
        if depth == 1:
            starts, state = unroll.starts, state[unroll.starts]


def _chain_starts(batch: Packed, depths: int) -> Tensor:
    """[R] int64: the tokens with a learned guess at a depth behind the first."""
    learned = torch.zeros(len(batch.token_ids), device=batch.token_ids.device)
    for depth in range(2, 1 + depths):
        learned = learned + batch.ahead(1 + depth)[1]
    return learned.nonzero()[:, 0]
