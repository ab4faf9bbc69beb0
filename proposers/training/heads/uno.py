"""UNO in training: the target learns to guess several tokens in one pass, by an adapter that only noise goes through (ifm-ai, 2026).

Behind a token stand up to K - 1 tokens of noise; each sees the text up to that token and the noise before it, and guesses the token behind
its own place. The text goes through the target as it is: what it says is the same with the adapter and without.
"""

import json
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ..block_attention import TEXT_AND_BLOCKS, Blocks
from ..cross_entropy import linear_cross_entropy
from ..frozen import FrozenTarget, product_type
from ..loop import Losses
from ..packing import Packed
from .base import Head
from .pard import slots_behind


@dataclass(frozen=True)
class UnoSettings:
    """Sizes of the adapter, and how blocks are learned."""

    num_tokens: int = 8              # K: guesses of one pass, the target's own next token among them
    rank: int = 32
    alpha: float = 64.0              # what the adapter adds counts alpha / rank
    retention: float = 0.8           # guess d is learned behind a share retention ** d of the tokens,
    min_retention: float = 0.2       # but no smaller one than this


class LowRank(nn.Module):
    """x -> (x @ down.T) @ up.T. Begins as 0."""

    def __init__(self, layer: nn.Linear, rank: int):
        super().__init__()
        self.down = nn.Parameter(torch.empty(rank, layer.in_features, dtype=torch.float32))
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank, dtype=torch.float32))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(nn.functional.linear(x, self.down), self.up)


class Uno(Head):
    """An adapter for every linear layer of the target's decoder layers."""

    def __init__(self, target: FrozenTarget, settings: UnoSettings | None = None):
        """The target's attention is replaced: from then on it is called with blocks. Raises ValueError if it is of another kind."""
        super().__init__(target)
        if not target.packs:
            raise ValueError(f"uno needs a target whose layers all attend to the whole text, not a {target.config.model_type} with others")
        self.settings = settings or UnoSettings()
        model = target.model
        model.set_attn_implementation(TEXT_AND_BLOCKS)
        layers = {name: layer for name, layer in model.named_modules() if name.startswith("model.layers.") and type(layer) is nn.Linear}
        self.names = list(layers)
        self.adapters: Any = nn.ModuleList(LowRank(layer, self.settings.rank).to(layer.weight.device) for layer in layers.values())
        self._calls = threading.local()
        for layer, adapter in zip(layers.values(), self.adapters, strict=True):
            layer.register_forward_hook(self._adding(adapter))

    def _adding(self, adapter: nn.Module) -> Any:
        scale = self.settings.alpha / self.settings.rank

        def hook(_layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            size: int = self._calls.size
            return torch.cat([output[:, :size], output[:, size:] + scale * adapter(inputs[0][:, size:])], 1)
        return hook

    def forward(self, batch: Packed, blocks: Blocks) -> Tensor:
        """States behind the final norm, [R, hidden], of all tokens of noise."""
        size = self._calls.size = len(batch.token_ids)
        token_ids, positions = torch.cat([batch.token_ids, self.noise(blocks)]), torch.cat([batch.positions, blocks.positions])
        output = self.target.model.model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, blocks=blocks)
        return output.last_hidden_state[0, size:]

    def noise(self, blocks: Blocks) -> Tensor:
        """[R] any tokens but the first."""
        generator = torch.Generator().manual_seed(blocks.batch.number)
        drawn = torch.randint(1, self.target.config.vocab_size, blocks.numbers.shape, generator=generator)
        return drawn.to(blocks.numbers.device)

    def blocks(self, batch: Packed) -> Blocks:
        return slots_behind(batch, self.settings.num_tokens, self.settings.retention, self.settings.min_retention)

    def loss(self, batch: Packed) -> Losses:
        blocks = self.blocks(batch)
        hidden = self(batch, blocks)
        labels, weights = blocks.ahead(1)
        rows = weights.nonzero()[:, 0]
        head = self.target.head.to(product_type(hidden))
        total, right = linear_cross_entropy(hidden[rows].to(head.dtype), head, labels[rows], weights[rows])
        metrics = {"loss": (float(total.detach()), float(len(rows)))}
        for depth in range(1, self.settings.num_tokens):
            tried = blocks.offsets[rows] == depth - 1
            metrics[f"accuracy_{depth}"] = float((right[tried] > 0).sum()), float(tried.sum())
        return Losses(total, float(len(rows)), metrics)

    def export(self, folder: Path) -> None:
        """As PEFT writes adapters."""
        kinds = sorted({name.rpartition(".")[2] for name in self.names})
        config: Mapping[str, Any] = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": Path(self.target.config.name_or_path).name,
            "r": self.settings.rank,
            "lora_alpha": self.settings.alpha,
            "target_modules": kinds,
            "bias": "none",
            "inference_mode": True,
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        tensors: dict[str, Tensor] = {}
        for name, adapter in zip(self.names, self.adapters, strict=True):
            for factor, tensor in (("A", adapter.down), ("B", adapter.up)):
                tensors[f"base_model.model.{name}.lora_{factor}.weight"] = tensor.detach().bfloat16().cpu().contiguous()
        save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
