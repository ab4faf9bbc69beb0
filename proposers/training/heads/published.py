"""A trained head as a folder: config.json beside bfloat16 tensors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor


def write_published(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors. Floating-point tensors become bfloat16, integers stay what they are."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    half = {name: tensor.detach().bfloat16() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    save_file({name: tensor.cpu().contiguous() for name, tensor in half.items()}, folder / "model.safetensors", {"format": "pt"})
