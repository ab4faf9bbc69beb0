"""A training state on disk: one safetensors file, tensors by number and everything else as JSON in its header. No pickle."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


def save(path: Path, state: Any) -> None:
    """Write dicts, lists, numbers, strings and tensors, nested as you like. The old file stays until the new one is whole."""
    tensors: dict[str, Tensor] = {}
    outline = json.dumps(_outline(state, tensors))
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, {"outline": outline})
    os.replace(partial, path)


def load(path: Path) -> Any:
    """What `save` was given."""
    with safe_open(path, framework="pt") as file:
        return _rebuilt(json.loads(file.metadata()["outline"]), file)


def _outline(value: Any, tensors: dict[str, Tensor]) -> Any:
    match value:
        case Tensor():
            name = str(len(tensors))
            tensors[name] = value.detach().clone(memory_format=torch.contiguous_format)  # tied weights share memory: files may not
            return {"tensor": name}
        case dict():
            return {"dict": [[key, _outline(item, tensors)] for key, item in value.items()]}  # pairs: keys may be numbers
        case list() | tuple():
            return {"list": [_outline(item, tensors) for item in value]}
        case _:
            return value


def _rebuilt(outline: Any, file: Any) -> Any:
    match outline:
        case {"tensor": name}:
            return file.get_tensor(name)
        case {"dict": pairs}:
            return {key: _rebuilt(item, file) for key, item in pairs}
        case {"list": items}:
            return [_rebuilt(item, file) for item in items]
        case _:
            return outline
