"""Medusa-1 in training: further heads on the target's last state, each for one token more ahead (https://arxiv.org/abs/2401.10774).

The target stays frozen. Heads read its own head's matrix, or have one each.
"""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn
from torch.nn.functional import silu

from ..frozen import FrozenTarget
from ..loop import Losses
from ..packing import Packed
from .base import Head
from .depth_loss import Depth, depth_losses
from .published import write_published


@dataclass(frozen=True)
class MedusaSettings:
    """Sizes, and how the loss falls off."""

    num_heads: int = 5               # tokens guessed
    num_layers: int = 1              # residual blocks of each head
    own_heads: bool = False          # a [vocabulary, hidden] matrix for each, as published; False: all read the target's
    decay: float = 0.8               # head k counts decay ** k


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b). Begins as the identity, so that a head begins as the target's own."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + silu(self.linear(x))


class Medusa(Head):
    """Each head is some residual blocks before an output matrix, learned by cross-entropy with the text."""

    def __init__(self, target: FrozenTarget, settings: MedusaSettings | None = None):
        super().__init__(target)
        self.settings = settings or MedusaSettings()
        width, heads = target.head.shape[1], range(self.settings.num_heads)
        self.blocks = nn.ModuleList(nn.Sequential(*(ResidualBlock(width) for _ in range(self.settings.num_layers))) for _ in heads)
        self.lm_heads = nn.ParameterList(target.head.float().clone() for _ in heads if self.settings.own_heads)

    def forward(self, states: Tensor) -> list[Tensor]:
        """States behind the target's final norm [..., hidden] -> what each head's output matrix reads, [..., hidden]."""
        return [block(states) for block in self.blocks]

    def output(self, head: int) -> Tensor:
        """[vocabulary, hidden]"""
        return self.lm_heads[head] if self.settings.own_heads else self.target.head

    def loss(self, batch: Packed) -> Losses:
        states = self(self.target(batch).last)
        decay = self.settings.decay
        return depth_losses(batch, (Depth(state, self.output(head), decay ** (1 + head)) for head, state in enumerate(states)))

    def export(self, folder: Path) -> None:
        """Without own heads as FasterDecoding names them; with own heads as vLLM does, which loads no others."""
        write_published(folder, self._config(), {self._name(name): tensor for name, tensor in self.state_dict().items()})

    def _name(self, name: str) -> str:
        parts = name.split(".")
        if parts[0] == "lm_heads":
            return f"{name}.weight"
        _, head, layer, _, kind = parts
        return f"blocks.{head}.layers.{layer}.{kind}" if self.settings.own_heads else f"{head}.{layer}.linear.{kind}"

    def _config(self) -> dict[str, object]:
        settings, (vocab_size, width) = self.settings, self.target.head.shape
        if not settings.own_heads:
            return {
                "base_model_name_or_path": Path(self.target.config.name_or_path).name,
                "medusa_num_heads": settings.num_heads,
                "medusa_num_layers": settings.num_layers,
            }
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": width,
            "vocab_size": vocab_size,
            "truncated_vocab_size": vocab_size,
            "num_heads": settings.num_heads,
            "num_hidden_layers": settings.num_layers,
            "medusa_fc_bias": True,
            "original_lm_head": False,
        }
