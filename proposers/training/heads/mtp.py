"""An MTP layer in training, of MiMo's dense form: a decoder layer over the target's last state and the token that followed it.

Norms of both, a projection, a layer of the target's own kind, the target's embedding and head (https://arxiv.org/abs/2412.19437,
https://arxiv.org/abs/2505.07608). One layer drafts as many tokens as it is looped: unrolled in training it learns to read
its own states (FastMTP, https://arxiv.org/abs/2509.18362).
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..frozen import FrozenTarget
from ..loop import Losses
from ..packing import Packed
from ..unrolled_attention import NAME, Unroll
from .base import Head
from .depth_loss import Depth, depth_losses
from .eagle import states_by_depth
from .published import write_published

KINDS = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class MtpSettings:
    """How far the layer is unrolled, and how wide its MLP is; its other sizes are the target's."""

    num_steps: int = 3               # tokens guessed in training; 1 is the plain MTP loss
    decay: float = 0.6               # step k counts decay ** k, all together 1
    intermediate_size: int | None = None     # None: the target's


class Mtp(Head):
    """One layer, looped. It begins as the target's last layer, which reads a state of nearly the same kind."""

    def __init__(self, target: FrozenTarget, settings: MtpSettings | None = None):
        """Raises ValueError for a target whose layers are of another kind than loaders know, and for an MLP wider than the target's."""
        super().__init__(target)
        self.settings = settings or MtpSettings()
        if target.config.model_type not in KINDS:
            raise ValueError(f"an MTP layer needs a target of type {', '.join(KINDS)}, not {target.config.model_type}")
        self.layer_config = config = copy.deepcopy(target.config)
        config.intermediate_size = self.settings.intermediate_size or config.intermediate_size
        config._attn_implementation = NAME
        if config.intermediate_size > target.config.intermediate_size:
            raise ValueError(f"intermediate_size can be {target.config.intermediate_size} at most: the layer begins as the target's last")
        last, norm, width = target.model.model.layers[-1], target.model.model.norm, config.hidden_size
        self.token_layernorm: nn.Module = type(norm)(width, config.rms_norm_eps)
        self.hidden_layernorm: nn.Module = type(norm)(width, config.rms_norm_eps)
        self.input_proj = nn.Linear(2 * width, width, bias=False)
        self.layer: nn.Module = type(last)(config, target.num_layers - 1)
        self.layer.load_state_dict(narrowed(last.state_dict(), config.intermediate_size))
        self.final_layernorm: nn.Module = type(norm)(width, config.rms_norm_eps)
        self.final_layernorm.load_state_dict(norm.state_dict())

    def forward(self, states: Tensor, token_ids: Tensor, positions: Tensor, unroll: Unroll) -> Tensor:
        """States behind the norm, [N, hidden].

        states: [N, hidden], the target's behind its final norm, or this layer's own of the step before; token_ids, positions: [N],
        of the token that each state chose. unroll: of the steps before on the same tokens; this one is added.
        """
        embedded = self.target.embed(token_ids)
        read = self.input_proj(torch.cat([self.hidden_layernorm(states), self.token_layernorm(embedded)], -1))[None]
        rope = self.target.model.model.rotary_emb(read, positions[None])
        return self.final_layernorm(self.layer(read, position_embeddings=rope, unroll=unroll)[0])

    def states(self, batch: Packed) -> Iterator[tuple[Tensor, Tensor]]:
        """See `states_by_depth`."""

        def head(states: Tensor, token_ids: Tensor, positions: Tensor, unroll: Unroll) -> Tensor:
            return self(states, token_ids, positions + 1, unroll)

        return states_by_depth(head, batch, self.target(batch).last, self.settings.num_steps)

    def loss(self, batch: Packed) -> Losses:
        shares = [self.settings.decay**step for step in range(self.settings.num_steps)]
        steps = zip(self.states(batch), shares, strict=True)
        return depth_losses(batch, (Depth(state, self.target.head, share / sum(shares), starts) for (starts, state), share in steps))

    def export(self, folder: Path) -> None:
        """As `speculators` writes it: a folder of its own, whose projection reads the embedding's half first."""
        state, token = self.input_proj.weight.chunk(2, 1)
        weights = {**self.state_dict(), "input_proj.weight": torch.cat([token, state], 1)}
        write_published(folder, self._config(), {f"mtp_layers.0.{name.removeprefix('layer.')}": tensor for name, tensor in weights.items()})

    def _config(self) -> dict[str, Any]:
        config = self.target.config
        layer = {**self.layer_config.to_diff_dict(), "num_hidden_layers": 1}
        if "layer_types" in layer:
            layer["layer_types"] = ["full_attention"]        # whatever the target's is: in training nothing is out of sight
        verifier = {"name_or_path": Path(config.name_or_path).name, "architectures": config.architectures}
        proposal = {"proposal_type": "greedy", "speculative_tokens": self.settings.num_steps}
        return {
            "architectures": ["FastMTPSpeculator"],
            "speculators_model_type": "mtp",
            "speculators_version": "0.9.0",
            "num_nextn_predict_layers": 1,
            "transformer_layer_config": layer,
            "speculators_config": {
                "algorithm": "mtp",
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": verifier,
            },
        }


def narrowed(layer: Mapping[str, Tensor], intermediate_size: int) -> dict[str, Tensor]:
    """A decoder layer's weights with `intermediate_size` neurons of its gated MLP at most: those that weigh most."""
    gate, up, down = (f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
    weight = layer[gate].norm(dim=1) * layer[up].norm(dim=1) * layer[down].norm(dim=0)
    kept = weight.topk(min(intermediate_size, len(weight))).indices.sort().values
    return {**layer, gate: layer[gate][kept], up: layer[up][kept], down: layer[down][:, kept]}
