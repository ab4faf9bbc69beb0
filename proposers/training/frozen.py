"""A frozen target that heads are trained against: what it makes of a batch of packed documents. Trains nothing.

Works for every transformers model whose decoder layers lie in `model.model.layers` and whose attention can be replaced.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from . import packed_attention
from .packing import Packed


@dataclass(frozen=True)
class Features:
    """States of the target at each of N tokens, without a graph, in the type of the running autocast (or the weights')."""

    last: Tensor                     # [N, hidden]: what its head reads, behind the final norm
    layers: dict[int, Tensor]        # by index i: [N, hidden], the residual stream behind decoder layer i (0-based)


class FrozenTarget:
    """Called with a batch, gives its Features. May be called by several threads at once. Not a module: nothing of it is trained."""

    def __init__(self, model: PreTrainedModel):
        self.model: Any = model.eval().requires_grad_(False)
        self.config: Any = model.config
        self._calls = threading.local()
        for index, layer in enumerate(self.model.model.layers):
            layer.register_forward_hook(self._keep(index))

    @staticmethod
    def load(folder: Path, device: torch.device | None = None) -> FrozenTarget:
        """Float32 weights of the model in `folder`, with packed attention."""
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=packed_attention.NAME)
        return FrozenTarget(model.to(device or torch.device("cpu")))

    def _keep(self, index: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            kept = getattr(self._calls, "kept", {})
            if index in kept:
                kept[index] = output[0] if isinstance(output, tuple) else output
        return hook

    @torch.no_grad()
    def __call__(self, batch: Packed, layers: Sequence[int] = ()) -> Features:
        """States behind the final norm and behind the decoder layers `layers`."""
        self._calls.kept = dict.fromkeys(layers)         # filled by the layers' hooks
        last = self.model.model(
            input_ids=batch.token_ids[None], position_ids=batch.positions[None], use_cache=False, bounds=batch.bounds,
        ).last_hidden_state[0]
        kept: dict[int, Any] = self._calls.kept
        self._calls.kept = {}
        dtype = product_type(last)
        return Features(last.to(dtype), {index: kept[index][0].to(dtype) for index in layers})

    @property
    def embedding(self) -> Tensor:
        """[vocabulary, hidden]"""
        return self.model.get_input_embeddings().weight

    @property
    def head(self) -> Tensor:
        """[vocabulary, hidden]"""
        return self.model.get_output_embeddings().weight

    @property
    def num_layers(self) -> int:
        return len(self.model.model.layers)


def product_type(like: Tensor) -> torch.dtype:
    """The type in which matrix products are made here: autocast's where it is on, else that of `like`."""
    device = like.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else like.dtype
