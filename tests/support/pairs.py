"""A transformers model beside our executor over its checkpoint, for tests that hold one to the other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_models import random_model
from transformers import PreTrainedConfig

from foretoken.kernels.decoder import text_half
from foretoken.kernels.execution import Execution
from foretoken.kernels.layout import Executor
from foretoken.kernels.stored_tensors import read_tensors
from foretoken.kernels.weights import load_program_executor

TORCH_FLOAT32 = Execution(torch.float32, prefer_native=False)


@dataclass
class Pair:
    """The executor is the torch executor in float32."""

    model: Any
    folder: Path
    executor: Executor

    @classmethod
    def save(cls, config: PreTrainedConfig, folder: Path) -> Pair:
        """Make a random model, write it to folder, and load it as a server would."""
        model = random_model(config)
        model.save_pretrained(folder)
        return cls(model, folder, cls.load(folder))

    @staticmethod
    def load(folder: Path, execution: Execution = TORCH_FLOAT32, max_model_len: int | None = None) -> Executor:
        saved = text_half(transformers.AutoConfig.from_pretrained(folder))
        return load_program_executor(read_tensors(list(folder.glob("*.safetensors"))), saved, execution, max_model_len)

    @torch.no_grad()
    def expect(self, token_ids: list[int]) -> Any:
        """What transformers makes of a whole sequence."""
        return self.model(torch.tensor([token_ids]), use_cache=False, output_hidden_states=True)


def random_tokens(seed: int, length: int, vocab_size: int) -> list[int]:
    return torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_near(actual: torch.Tensor | None, expected: torch.Tensor) -> None:
    """Within 1e-5 of the largest entry."""
    assert actual is not None and actual.shape == expected.shape
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()
