"""Checkpoints: reads the tensors of safetensors files, checks them against a program, and binds the two to an executor.

Only safetensors are read. Knows no model family: names and shapes come from the program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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


class WeightError(ValueError):
    """A checkpoint is missing, damaged or not the one its config describes. The message names the tensors."""


def load_program_executor(
    files: Sequence[Path], hf_config: PreTrainedConfig, dtype: torch.dtype, max_model_len: int | None = None
) -> Executor:
    """The network of a checkpoint, ready to run. Raises WeightError, or UnsupportedModel where supports() is False."""
    program = fuse(decoder_program(hf_config, max_model_len))
    tensors = read_tensors(files)
    check_tensors(program, tensors)
    return TorchExecutor(program, tensors, dtype)


def read_tensors(files: Sequence[Path]) -> Mapping[str, Tensor]:
    """All tensors of safetensors files by name, mapped into memory only when asked for. Raises WeightError."""
    return _TensorFiles(files)


def check_tensors(program: Program, tensors: Mapping[str, Tensor]) -> None:
    """Raise WeightError unless tensors are what the program names: all there, none unused, of its shapes, all finite."""
    tied = "lm_head.weight" not in program.weights  # then some checkpoints hold a copy of the embedding
    unexpected = [name for name in sorted(set(tensors) - set(program.weights)) if not _is_redundant(name, tied)]
    missing = sorted(set(program.weights) - set(tensors))
    complaints = [f"{label}: {_some(names)}" for label, names in (("missing", missing), ("unexpected", unexpected)) if names]
    if complaints:
        raise WeightError(f"the checkpoint's tensors do not fit its config.json; {'; '.join(complaints)}")
    for name, shape in program.weights.items():
        if tuple(tensors[name].shape) != shape:
            raise WeightError(f"{name} has shape {tuple(tensors[name].shape)}, but config.json asks for {shape}")
    check_finite(tensors)


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise WeightError for NaN and infinity: a damaged file still loads, and then every answer is nonsense."""
    for name, tensor in tensors.items():
        # The sum is finite unless an entry is not, or finite entries overflow it; only then look at each.
        if not tensor.sum(dtype=torch.float32).isfinite() and not tensor.isfinite().all():
            raise WeightError(f"{name} contains NaN or infinite values; the checkpoint is damaged")


class _TensorFiles(Mapping[str, Tensor]):
    """Tensor name -> tensor over several safetensors files."""

    def __init__(self, paths: Sequence[Path]) -> None:
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


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise WeightError(f"{path} is damaged or incomplete ({error}); fetch the file again") from error


def _is_redundant(name: str, tied: bool) -> bool:
    return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")


def _some(names: list[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
