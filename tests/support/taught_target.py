"""A tiny target that has learned the text of `training_heads`: what heads need that learn the target's own probabilities."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from training_heads import TinyTarget, Training, document, llama_config
from transformers import LlamaForCausalLM

from foretoken.proposers.training.frozen import FrozenTarget
from foretoken.proposers.training.packed_attention import NAME
from foretoken.proposers.training.target import TargetTrainee

LAYERS = 7


class TaughtTarget(TinyTarget):
    """Deep enough that the usual taps are three layers."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, LlamaForCausalLM(llama_config(num_hidden_layers=LAYERS)))
        model = LlamaForCausalLM.from_pretrained(folder, attn_implementation=NAME, dtype=torch.float32)
        after = Training(cast(Any, TargetTrainee(model)), folder / "taught", lr=1e-2, steps=30).after
        assert after["accuracy"] > 0.7
        model.save_pretrained(folder)
        self.frozen = FrozenTarget.load(folder)

    def state(self, text: Sequence[int], boundary: int) -> Tensor:
        """[HIDDEN] of the last token: the input of layer `boundary`, or behind the final norm."""
        if boundary == -1:
            return self.states(text)[-1]
        return self.frozen(document(text), [boundary - 1]).layers[boundary - 1][-1]
