"""A second set of attention weights in a target's folder, in the layout of the Orthrus authors."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def add_view(folder: Path, **config: Any) -> Path:
    """Random weights. config: mask_token_id and block_size, and what else its config.json is to say."""
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    for name in [name for name in weights if ".self_attn." in name]:
        part = weights[name]
        other = torch.rand(part.shape) + 0.5 if part.dim() == 1 else torch.randn(part.shape) / part.shape[-1] ** 0.5
        weights[name.replace("_proj.", "_proj_diff.").replace("_norm.", "_norm_diff.")] = other
    save_file(weights, file, {"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, **config}))
    return folder


def orthrus_of(target: Path, folder: Path) -> Path:
    """A copy of a target that brings such weights along."""
    shutil.copytree(target, folder)
    return add_view(folder, mask_token_id=1, block_size=4)
