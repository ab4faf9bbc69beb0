"""Adapters with random factors, rows that have them, and what a network would be with one merged into its weights."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken.kernels.adapters import AdapterBank
from foretoken.kernels.layout import RaggedBatch

Pairs = dict[str, tuple[Tensor, Tensor]]


def random_pairs(bank: AdapterBank, seed: int, rank: int | None = None, weights: str = "") -> Pairs:
    """For all weights of the bank whose names contain `weights`: down [rank, in], up [out, rank], about as great as the weights."""
    generator, size = torch.Generator().manual_seed(seed), bank.rank if rank is None else rank
    chosen = {name: shape for name, shape in bank.shapes.items() if weights in name}
    return {
        name: (torch.randn(size, width, generator=generator) * width**-0.5, torch.randn(out, size, generator=generator) * size**-0.5)
        for name, (out, width) in chosen.items()
    }


def check_a_refilled_slot(bank: AdapterBank, say: Callable[[], Tensor]) -> None:
    """say: scores of rows that have slot 2."""
    new = random_pairs(bank, 5, rank=1, weights="q_proj")
    bank.put(2, new)
    fresh = say()
    bank.put(2, random_pairs(bank, 4))
    assert not torch.allclose(say(), fresh)
    bank.put(2, new)
    assert torch.equal(say(), fresh), "it remembers what it held"


def merged(weights: Mapping[str, Tensor], pairs: Pairs) -> dict[str, Tensor]:
    """The weights with an adapter in them."""
    return {name: weight + pairs[name][1] @ pairs[name][0] if name in pairs else weight for name, weight in weights.items()}


def save_adapter(folder: Path, pairs: Pairs, alpha: float | None = None, **config: Any) -> Path:
    """As PEFT writes it. alpha: None = what leaves the factors as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = max(len(down) for down, _ in pairs.values())
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": rank if alpha is None else alpha, "bias": "none", "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(said | config))
    tensors: dict[str, Tensor] = {}
    for weight, (down, up) in pairs.items():
        module = f"base_model.model.{weight.removesuffix('.weight')}"
        tensors |= {f"{module}.lora_A.weight": down.contiguous(), f"{module}.lora_B.weight": up.contiguous()}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged_model(target: Path, pairs: Pairs, folder: Path) -> Path:
    """A copy of a model's folder with an adapter in its weights."""
    shutil.copytree(target, folder)
    save_file(merged(load_file(target / "model.safetensors"), pairs), folder / "model.safetensors", {"format": "pt"})
    return folder


def pairs_for(target: Path, seed: int, rank: int = 4, weights: str = "_proj", size: float = 1.0) -> Pairs:
    """Random factors for a checkpoint's linear layers whose names contain `weights`."""
    tensors = load_file(target / "model.safetensors")
    shapes = {name: tensor.shape for name, tensor in tensors.items() if weights in name and tensor.dim() > 1}
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (size * torch.randn(rank, width, generator=generator) * width**-0.5, torch.randn(out, rank, generator=generator) * rank**-0.5)
        for name, (out, width) in sorted(shapes.items())
    }


def with_adapters(batch: RaggedBatch, *slots: int) -> RaggedBatch:
    """The batch with an adapter for each of its rows, 0 = none."""
    return dataclasses.replace(batch, adapters=torch.tensor(slots, dtype=torch.int32))
