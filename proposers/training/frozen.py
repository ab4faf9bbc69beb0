"""A frozen target that heads are trained against: what it makes of a batch of packed documents. Trains nothing.

Works for every transformers model whose decoder layers lie in `model.model.layers`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from . import packed_attention
from .cross_entropy import Teacher
from .packing import Packed

LAST = -1                            # in place of a layer's index: behind the final norm


@dataclass(frozen=True)
class Features:
    """States of the target at each of N tokens, without a graph, in the type of the running autocast (or the weights')."""

    last: Tensor                     # [N, hidden]: what its head reads, behind the final norm
    layers: dict[int, Tensor]        # by index i: [N, hidden], the residual stream behind decoder layer i (0-based)


class FrozenTarget:
    """Called with a batch, gives its Features. May be called by several threads at once. Not a module: nothing of it is trained."""

    def __init__(self, model: PreTrainedModel):
        """Raises ValueError for a model whose layers lie elsewhere."""
        self.model: Any = model.eval().requires_grad_(False)
        self.config: Any = model.config
        self._calls = threading.local()
        try:
            layers = self.model.model.layers
        except AttributeError as error:
            raise ValueError(f"targets of type {self.config.model_type} can be served, but drafters are not trained for them") from error
        for index, layer in enumerate(layers):
            layer.register_forward_hook(_keep(self._calls, index))
        self.packs = attends_to_all(model)
        if self.packs:
            model.set_attn_implementation(packed_attention.NAME)

    @staticmethod
    def load(folder: Path, device: str | torch.device = "cpu") -> FrozenTarget:
        """Float32 weights of the model in `folder`; on "meta" none, but those of a quantised one are read. Raises ValueError."""
        config = AutoConfig.from_pretrained(folder)
        # "eager" is the one attention that has the sinks and caps of every family.
        form: Any = {"dtype": torch.float32, "attn_implementation": "eager"}
        if str(device) == "meta" and getattr(config, "quantization_config", None) is None:  # whose reader may be missing
            with torch.device(device):
                return FrozenTarget(AutoModelForCausalLM.from_config(config, **form))
        model: Any = AutoModelForCausalLM.from_pretrained(folder, **form)
        return FrozenTarget(model.to(device))

    @torch.no_grad()
    def __call__(self, batch: Packed, layers: Sequence[int] = ()) -> Features:
        """States behind the final norm and behind the decoder layers `layers`."""
        bounds = [(0, batch.bounds[-1])] if self.packs else list(pairwise(batch.bounds))
        more = {"bounds": batch.bounds} if self.packs else {}
        parts: list[dict[int, Any]] = []
        for start, end in bounds:
            self._calls.kept = dict.fromkeys(layers)     # filled by the layers' hooks
            ids, positions = batch.token_ids[None, start:end], batch.positions[None, start:end]
            output = self.model.model(input_ids=ids, position_ids=positions, use_cache=False, **more)
            parts.append({**self._calls.kept, LAST: output.last_hidden_state})
        self._calls.kept = {}
        states = {index: torch.cat([part[index][0] for part in parts]) for index in (*layers, LAST)}
        dtype = product_type(states[LAST])
        return Features(states[LAST].to(dtype), {index: states[index].to(dtype) for index in layers})

    def embed(self, token_ids: Tensor) -> Tensor:
        """[..., hidden]: what its first layer reads of tokens, which heads that share the embedding read, too."""
        config = self.config
        scale = config.hidden_size**0.5 if getattr(config, "mup_enabled", False) else getattr(config, "embedding_multiplier", 1.0)
        return self.model.get_input_embeddings()(token_ids) * scale

    @property
    def embedding(self) -> Tensor:
        """[vocabulary, hidden]"""
        return self.model.get_input_embeddings().weight

    @cached_property
    def head(self) -> Tensor:
        """[vocabulary, hidden], at the scale of its logits."""
        config, weight = self.config, self.model.get_output_embeddings().weight
        divisor = getattr(config, "logits_scaling", 1.0)
        if config.model_type == "hyperclovax":               # which multiplies by it
            divisor = 1 / divisor
        scale = getattr(config, "logit_scale", 1.0) * getattr(config, "lm_head_multiplier", 1.0) / divisor
        return weight if scale == 1.0 else weight * scale

    def teacher(self, hidden: Tensor, head: Tensor, weight: float) -> Teacher:
        """Its probabilities. hidden: [N, hidden], of its last states; head: of its rows, in the student's order."""
        return Teacher(hidden, head, weight, getattr(self.config, "final_logit_softcapping", None))

    @property
    def num_layers(self) -> int:
        return len(self.model.model.layers)


def attends_to_all(model: PreTrainedModel) -> bool:
    """Whether each layer sees a document's tokens so far by attention alone, which can be replaced, and all of them.

    Where a window, sinks, caps of scores or recurrences are, there is a window or a convolution.
    """
    config: Any = model.config
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    window = getattr(config, "sliding_window", None)
    if kinds or window is not None or not model._can_set_attn_implementation():
        return False
    return not any(isinstance(module, nn.Conv1d) for module in model.modules())


def product_type(like: Tensor) -> torch.dtype:
    """The type in which matrix products are made here: autocast's where it is on, else that of `like`."""
    device = like.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else like.dtype


def _keep(calls: threading.local, index: int) -> Callable[..., None]:
    """Of a layer: it knows the calls alone, so that a target that nobody has any more is gone at once, with its gigabytes."""
    def hook(_module: Any, _inputs: Any, output: Any) -> None:
        kept = getattr(calls, "kept", {})
        if index in kept:
            kept[index] = output[0] if isinstance(output, tuple) else output
    return hook
