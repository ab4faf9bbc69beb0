"""An EAGLE checkpoint's tensors by one set of names: those that programs use, whatever its publisher calls them.

Knows the names, not what they are for.
"""

from __future__ import annotations

import re

from torch import Tensor

from .checkpoint import Checkpoint

_IGNORED = re.compile(r"(^|\.)(t2d$|verifier_|rotary_emb\.inv_freq$)")  # left over from training


class EagleTensors:
    """A checkpoint's tensors by the names that programs use, whatever its layout calls them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        checkpoint.ignore(*(name for name in checkpoint.names if _IGNORED.search(name)))

    def has(self, name: str) -> bool:
        return self._find(name) is not None

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises SpeculativeConfigError if there is no such tensor, as `take` does."""
        found = self._find(name)
        return tuple(self.take(name).shape) if found is None else self.checkpoint.shape(found)

    def take(self, name: str, *shape: int) -> Tensor:
        return self.checkpoint.take(self._find(name) or _spellings(name)[0], *shape)

    def num_layers(self) -> int:
        """Counted, because published configs say 40 where the file has one."""
        count = 0
        while self.has(f"model.layers.{count}.self_attn.q_proj.weight"):
            count += 1
        return max(count, 1)

    def _find(self, name: str) -> str | None:
        return self.checkpoint.find(*_spellings(name))


def _spellings(name: str) -> list[str]:
    """What files call the tensor that programs call `name`, the commonest first."""
    names = [name.removeprefix("model.")]
    if match := re.match(r"model\.layers\.(\d+)\.(.*)", name):
        names.append(f"midlayer.{match[1]}.{match[2]}")
        if match[1] == "0":
            names += [f"midlayer.{match[2]}", f"transformer.{match[2]}"]
    if name in ("fc.weight", "fc.bias"):
        names.append(f"fusion_{name}")
    if match := re.match(r"fc_norm\.([012])\.weight", name):
        names.append(f"aux_norm_{('low', 'mid', 'high')[int(match[1])]}.weight")
    return [prefix + spelling for spelling in names for prefix in ("", "model.")]
