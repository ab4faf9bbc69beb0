"""What a model folder holds, found by its content: which speculative method its weights belong to, and how many Medusa heads.

Reads config.json and the headers of safetensors files, never weights and never names of folders.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

NGRAM_NAMES = ("ngram", "[ngram]")  # vLLM's literals for "no model at all"

_MEDUSA_HEAD = re.compile(r"^(?:medusa_heads?\.)?(?:blocks\.)?(\d+)\.(?:layers\.)?\d+\.(?:linear\.)?weight$")


def detect_method(model: str) -> str:
    """The method that a `model` without a `method` means. What cannot be read here (a hub id) counts as a draft model."""
    if model in NGRAM_NAMES:
        return "ngram"
    folder = Path(model)
    config = _read_config(folder)
    if "speculators_model_type" in config:
        kind = str(config["speculators_model_type"])
        return {"peagle": "eagle3", "dflash2": "dflash"}.get(kind, kind)
    architecture = (config.get("architectures") or [""])[0].lower()
    model_type = config.get("model_type", "")
    names = tensor_names(folder)
    if "dspark" in architecture or any("markov_head." in name for name in names):
        return "dspark"
    if "dflash" in architecture or "dflash_config" in config:
        return "dflash"
    if "eagle3" in architecture or any(name.endswith("hidden_norm.weight") for name in names):
        return "eagle3"
    if "eagle" in architecture or model_type == "eagle" or {"fc.weight", "model.fc.weight"} & names:
        return "eagle"
    if model_type == "medusa" or "medusa_num_heads" in config:
        return "medusa"
    if model_type == "mlp_speculator" or any("speculator.emb." in name for name in names):
        return "mlp_speculator"
    if "pard_token" in config:
        return "pard"
    return "draft_model"


def count_medusa_heads(folder: Path) -> int:
    """Medusa heads among the folder's tensors: counted, because published configs say 2 where the file has 5."""
    return len({match[1] for name in tensor_names(folder) if (match := _MEDUSA_HEAD.match(name))})


def tensor_names(folder: Path) -> set[str]:
    """Names of all tensors in the folder's safetensors files; empty if there is no such folder."""
    return {name for path in sorted(folder.glob("*.safetensors")) for name in _header(path) if name != "__metadata__"}


def _header(path: Path) -> dict[str, Any]:
    """A safetensors file opens with 8 bytes of little-endian length, then that much JSON: tensor name -> dtype, shape, offsets."""
    with path.open("rb") as file:
        return json.loads(file.read(int.from_bytes(file.read(8), "little")))


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
