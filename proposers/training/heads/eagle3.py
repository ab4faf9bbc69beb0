"""EAGLE-3 in training: one layer over states from three depths of the target, unrolled so that it learns to go on from its own.

Training-time test (https://arxiv.org/abs/2503.01840): step 0 reads the target's fused states, each later step what the one before
it made, and attends as it will when it drafts. All steps learn the target's probabilities, over a draft vocabulary of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from ..cross_entropy import linear_cross_entropy
from ..frozen import Features, FrozenTarget, product_type
from ..loop import Losses
from ..packing import Packed
from ..unrolled_attention import Unroll
from .base import Head
from .eagle import layer_config, published_config, states_by_depth
from .published import write_published

SHARPNESS = 1.2                      # of a first look: a place is then some e^10 times as near to itself as to others


@dataclass(frozen=True)
class Eagle3Settings:
    """Sizes, and how far the layer is unrolled. None: the target's, or what is usual."""

    draft_vocab_size: int | None = None
    intermediate_size: int | None = None
    taps: tuple[int, ...] | None = None      # boundaries k: the input of layer k
    num_steps: int = 5               # guesses in a row in training
    decay: float = 0.8               # step k counts decay ** k


class Eagle3(Head):
    """Modules are named as published."""

    token_ids: Tensor                # [draft vocabulary] int64, ascending
    rows: Tensor                     # [vocabulary] int64: where each token stands in the draft vocabulary, or -1

    def __init__(self, target: FrozenTarget, settings: Eagle3Settings | None = None, counts: Tensor | None = None):
        """counts: [vocabulary], how often the text to be learned says each token; a draft vocabulary needs them.

        Raises ValueError for a draft vocabulary without counts, or for taps that the target does not have.
        """
        super().__init__(target)
        self.settings = settings = settings or Eagle3Settings()
        self.taps = settings.taps or usual_taps(target.num_layers)
        if list(self.taps) != sorted(set(self.taps)) or not 0 < self.taps[0] <= self.taps[-1] <= target.num_layers:
            raise ValueError(f"taps must ascend within 1 to {target.num_layers}, the target's layers, not {self.taps}")
        self.layer_config = config = layer_config(target, settings.intermediate_size)
        width, vocab_size = config.hidden_size, len(target.head)
        self.fc = nn.Linear(len(self.taps) * width, width, bias=False)
        # Begin with the deepest state as it is: the head's rows are the target's, and read something near to it.
        self.fc.weight.data.zero_()[:, -width:].fill_diagonal_(1.0)
        self.midlayer = Midlayer(config)
        self.norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.rotary: nn.Module = LlamaRotaryEmbedding(config)
        token_ids = draft_vocabulary(counts, settings.draft_vocab_size or vocab_size, vocab_size)
        rows = torch.full((vocab_size,), -1).index_copy_(0, token_ids, torch.arange(len(token_ids)))
        self.register_buffer("token_ids", token_ids)
        self.register_buffer("rows", rows)
        self.lm_head = nn.Linear(width, len(token_ids), bias=False)
        self.lm_head.weight.data.copy_(target.head[token_ids])

    def forward(self, state: Tensor, token_ids: Tensor, positions: Tensor, unroll: Unroll) -> Tensor:
        """The states that follow, [N, hidden], before the norm: the head reads them behind it, the next step as they are.

        state: [N, hidden], fused from the target's, or this head's own of the step before; token_ids: [N], that each state
        chose; positions: [N], of the states. unroll: of the steps before on the same tokens; this one is added.
        """
        embedded = self.target.embed(token_ids)
        return self.midlayer(embedded[None], state[None], self.rotary(state, positions[None]), unroll)[0]

    def states(self, batch: Packed, features: Features) -> Iterator[tuple[Tensor, Tensor]]:
        """See `states_by_depth`."""
        state = self.fc(torch.cat([features.layers[tap - 1] for tap in self.taps], -1))
        return states_by_depth(self, batch, state, self.settings.num_steps)

    def loss(self, batch: Packed) -> Losses:
        features = self.target(batch, [tap - 1 for tap in self.taps])
        target_head = self.target.head[self.token_ids]
        target_head = target_head.to(product_type(target_head))
        totals: list[Tensor] = []
        metrics: dict[str, tuple[float, float]] = {}
        for depth, (starts, state) in enumerate(self.states(batch, features), 1):
            labels, weights = batch.ahead(1 + depth)
            rows_of_labels = self.rows[labels[starts]]
            learned = (weights[starts] > 0).nonzero()[:, 0]
            known = learned[rows_of_labels[learned] >= 0]    # other tokens cannot be guessed; as published, nothing is learned there
            normed = self.norm(state[known])
            total, right = linear_cross_entropy(
                normed.to(product_type(normed)),
                self.lm_head.weight,
                rows_of_labels[known],
                torch.ones(len(known), device=known.device),
                self.target.teacher(features.last[starts[known] + depth], target_head, 1.0),
            )
            totals.append(self.settings.decay ** (depth - 1) * total)
            metrics[f"accuracy_{depth}"] = float(right.sum()), float(len(learned))
        loss, weight = torch.stack(totals).sum(), metrics["accuracy_1"][1]
        return Losses(loss, weight, {"loss": (float(loss.detach()), weight), **metrics})

    def export(self, folder: Path) -> None:
        """The embedding is left out: it is the target's. Both readers of layer numbers find the list that they read."""
        own = ("token_ids", "rows")
        tensors = {name: tensor for name, tensor in self.state_dict().items() if name not in own}
        if len(self.token_ids) < len(self.rows):
            tensors["d2t"] = self.token_ids - torch.arange(len(self.token_ids), device=self.token_ids.device)
            tensors["t2d"] = self.rows >= 0
        outputs = [tap - 1 for tap in self.taps]
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLMEagle3"],
            **published_config(self.layer_config),
            "draft_vocab_size": len(self.token_ids),
            "eagle_aux_hidden_state_layer_ids": list(self.taps),
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": outputs},
        }
        write_published(folder, config, tensors)


class Midlayer(nn.Module):
    """Attention over [norm(embedding); norm(state)], and an MLP. The embedding is never added to the state."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        width = config.hidden_size
        self.input_layernorm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(2 * width, narrow.out_features, bias=False))
        self.mlp = LlamaMLP(config)
        self.look_at_itself(config)

    @torch.no_grad()
    def look_at_itself(self, config: LlamaConfig) -> None:
        """Begin with half of the heads looking at their own place: keys and queries are the same there, and alike nowhere else.

        The embedding comes in through attention alone. Until heads have found it by themselves, nothing is known of the token before.
        """
        width, num_keys = self.self_attn.head_dim, config.num_key_value_heads or 1
        heads_per_key = config.num_attention_heads // num_keys
        for number in range(max(1, num_keys // 2)):
            keys = self.self_attn.k_proj.weight[number * width:(number + 1) * width]
            nn.init.orthogonal_(keys, SHARPNESS)
            for head in range(number * heads_per_key, (number + 1) * heads_per_key):
                self.self_attn.q_proj.weight[head * width:(head + 1) * width] = keys

    def forward(self, embedded: Tensor, state: Tensor, rope: tuple[Tensor, Tensor], unroll: Unroll) -> Tensor:
        read = torch.cat([self.input_layernorm(embedded), self.hidden_norm(state)], -1)
        attended, _ = self.self_attn(read, position_embeddings=rope, attention_mask=None, unroll=unroll)
        state = state + attended
        return state + self.mlp(self.post_attention_layernorm(state))


def draft_vocabulary(counts: Tensor | None, size: int, vocab_size: int) -> Tensor:
    """[size] int64, ascending: the tokens said most often. Raises ValueError if that is a choice and there are no counts."""
    if size >= vocab_size:
        return torch.arange(vocab_size)
    if counts is None:
        raise ValueError(f"a draft vocabulary of {size} tokens is chosen by how often the training text has them: pass counts")
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def usual_taps(num_layers: int) -> tuple[int, ...]:
    """2, L // 2 and L - 3, as published; of a target too shallow for those, the first, the middle and the last."""
    published = (2, num_layers // 2, num_layers - 3)
    return published if published[0] < published[1] < published[2] else tuple(sorted({1, (num_layers + 1) // 2, num_layers}))
