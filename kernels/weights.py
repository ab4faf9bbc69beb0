"""Checkpoints: finds the tensors of a folder, checks them against a program, and binds the two to an executor.

Only safetensors are read. Knows no model family: names and shapes come from the program.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedConfig

from .decoder import decoder_program
from .fuse import fuse
from .layout import Executor
from .program import Program
from .torch_executor import TorchExecutor

_INDEX = "model.safetensors.index.json"


class WeightError(ValueError):
    """A checkpoint is missing, damaged or not the one its config describes. The message names the tensors."""


def load_program_executor(
    folder: Path, hf_config: PreTrainedConfig, dtype: torch.dtype, max_model_len: int | None = None
) -> Executor:
    """The network of a checkpoint folder, ready to run. Raises WeightError, or UnsupportedModel where supports() is False."""
    program = fuse(decoder_program(hf_config, max_model_len))
    tensors = read_tensors(folder)
    check_tensors(program, tensors)
    return TorchExecutor(program, tensors, dtype)


def read_tensors(folder: Path) -> Mapping[str, Tensor]:
    """All tensors of a folder's safetensors files by name, mapped into memory only when asked for. Raises WeightError."""
    return _TensorFiles(_shards(folder))


def check_tensors(program: Program, tensors: Mapping[str, Tensor]) -> None:
    """Raise WeightError unless tensors are what the program names: all there, none unused, of its shapes, all finite."""
    tied = "lm_head.weight" not in program.weights  # then some checkpoints hold a copy of the embedding
    unexpected = [name for name in sorted(set(tensors) - set(program.weights)) if not _is_redundant(name, tied)]
    missing = sorted(set(program.weights) - set(tensors))
    complaints = [f"{label}: {_some(names)}" for label, names in (("missing", missing), ("unexpected", unexpected)) if names]
    if complaints:
        raise WeightError(f"the checkpoint's tensors do not fit its config.json; {'; '.join(complaints)}")
    for name, shape in program.weights.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            raise WeightError(f"{name} has shape {tuple(tensor.shape)}, but config.json asks for {shape}")
        # The sum is finite unless an entry is not, or finite entries overflow it; only then look at each.
        if not tensor.sum(dtype=torch.float32).isfinite() and not tensor.isfinite().all():
            raise WeightError(f"{name} contains NaN or infinite values; the checkpoint is damaged")


class _TensorFiles(Mapping[str, Tensor]):
    """Tensor name -> tensor over several safetensors files."""

    def __init__(self, paths: list[Path]) -> None:
        self._path_of: dict[str, Path] = {}
        self._handles = {path: _open(path) for path in paths}
        for path, handle in self._handles.items():
            for name in handle.keys():
                if name in self._path_of:
                    raise WeightError(f"{name} is in both {self._path_of[name].name} and {path.name}")
                self._path_of[name] = path

    def __getitem__(self, name: str) -> Tensor:
        return self._handles[self._path_of[name]].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._path_of)

    def __len__(self) -> int:
        return len(self._path_of)


def _shards(folder: Path) -> list[Path]:
    """The files that hold the model: those of the index, else model.safetensors, else every safetensors file."""
    if (folder / _INDEX).is_file():
        try:
            names = set(json.loads((folder / _INDEX).read_text())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightError(f"{folder / _INDEX} is not a safetensors index: {error!r}") from error
        paths = [folder / name for name in sorted(names)]
    elif (folder / "model.safetensors").is_file():  # Mistral's repositories hold consolidated.safetensors beside it
        paths = [folder / "model.safetensors"]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise WeightError(f"{folder} has no .safetensors file")
    absent = [path.name for path in paths if not path.is_file()]
    if absent:
        raise WeightError(f"{folder} lacks {_some(absent)}, which its index names")
    return paths


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise WeightError(f"{path} cannot be read: {error}") from error


def _is_redundant(name: str, tied: bool) -> bool:
    return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")


def _some(names: list[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
