"""MTP modules among a target's tensors, or in a folder of their own: which family's they are, and what belongs to each.

Told by tensor names, because configs go on announcing modules that a conversion has left out. Knows no networks.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from ..kernels.stored_tensors import WeightError, named, read_tensors
from ..kernels.weights import draft_layer_names
from .checkpoint import Checkpoint
from .config_entry import SpeculativeConfigError
from .detection import nested, read_config, tensor_shapes
from .loading import TargetView

_Numbered = Literal["DeepSeek-V3", "GLM-4 MoE", "GLM-4.7-Flash", "Hunyuan 3"]
Kind = Literal["MiMo", "speculators", _Numbered, "Qwen3-Next", "Qwen3.5", "K-EXAONE", "ERNIE-4.5", "Nemotron 3"]

NUMBERED: dict[str, Kind] = {
    "deepseek_v3": "DeepSeek-V3",
    "glm4_moe": "GLM-4 MoE",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "hy_v3": "Hunyuan 3",
}
"""Model types whose modules are numbered as if they were further layers, and hold one of the target's own with experts."""
EXAONE = "exaone_moe"
GATED: dict[str, Kind] = {"qwen3_next": "Qwen3-Next", "qwen3_5_text": "Qwen3.5", "qwen3_5_moe_text": "Qwen3.5", EXAONE: "K-EXAONE"}
"""Model types whose modules share all but their layers, which are the target's own with attention."""
ERNIE = "ernie4_5_moe"
NEMOTRON = "nemotron_h"
SPECULATORS = "mtp_layers."
"""What `speculators` puts before a module's number, whichever family it is of."""
_ANNOUNCEMENTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
_SHARED_BY_GATED = ("mtp.fc.", "mtp.pre_fc_norm_")
_OWN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(GATED, _SHARED_BY_GATED),
    ERNIE: ("model.mtp_block.0.",),
    NEMOTRON: ("mtp.layers.0.eh_proj.",),
}
"""What begins the names of tensors that only a module of this model type's has."""
# Families whose modules are known, and why their guesses cannot be had.
_NOT_AVAILABLE = {
    "model.mtp_block.": "ERNIE-4.5",
    "model.mtp.layers.": "MiMo-V2 or LongCat",
    "model.mtp.": "LongCat, Inkling or another family",
    "mtp.": "EXAONE 4.5 or another family",
}


@dataclass(frozen=True)
class MtpModule:
    """The module that guesses, its tensors by names without the prefix."""

    kind: Kind
    prefix: str
    num_modules: int
    checkpoint: Checkpoint

    @property
    def reads_state_first(self) -> bool:
        """Whether its projection reads [state; embedding], as MiMo's, or [embedding; state], as all others.

        `speculators` has read the embedding first since its 0.6, and names its version. Folders of its layout that name none
        were written before, or by our own training before it did.
        """
        return self.kind == "MiMo" or (self.kind == "speculators" and "speculators_version" not in self.checkpoint.config)

    @property
    def is_of_speculators(self) -> bool:
        return self.prefix.startswith(SPECULATORS)

    @property
    def layer_config(self) -> Mapping[str, Any]:
        """What a folder of its own says of its layer; empty if it says nothing."""
        return nested(self.checkpoint.config, "transformer_layer_config")

    def has(self, name: str) -> bool:
        return self.checkpoint.has(self.prefix + name)

    def take(self, name: str, *shape: int) -> Tensor:
        return self.checkpoint.take(self.prefix + name, *shape)


def brings_module(folder: Path, model_type: str) -> bool:
    """Whether a target of this type has a module of its own in its folder."""
    names = tensor_shapes(folder)
    if model_type in NUMBERED:
        return bool(draft_layer_names(names))
    return any(name.startswith(("model.mtp_layers.0.", *_OWN.get(model_type, ()))) for name in names)


def find_module(folder: Path, target: TargetView) -> MtpModule:
    """Raises SpeculativeConfigError if the folder has none, or none that can be run."""
    names = set(tensor_shapes(folder))
    kind, stem, first = _family(names, folder, target)
    numbers = {int(match[1]) for name in names if (match := re.match(re.escape(stem) + r"(\d+)\.", name))}
    num_modules = 1 if kind == "Nemotron 3" else sum(number >= first for number in numbers)  # its one has several layers
    prefix = {"mtp.layers.": "mtp.", "model.mtp_block.": "model.mtp_"}.get(stem, f"{stem}{first}.")
    checkpoint = Checkpoint(folder, _tensors(folder, prefix))
    # Copies of what the target has, trained with it as one: only the target's are kept.
    checkpoint.ignore(*(prefix + copied for copied in ("embed_tokens.weight", "shared_head.head.weight", "shared_head.weight")))
    if kind in GATED.values():
        checkpoint.ignore(*(name for name in checkpoint.names if name.startswith(stem) and not name.startswith(f"{stem}{first}.")))
    return MtpModule(kind, prefix, num_modules, checkpoint)


def _family(names: set[str], folder: Path, target: TargetView) -> tuple[Kind, str, int]:
    """Which it is, what stands before the number in its tensors' names, and the number of the first module."""
    if any(name.startswith("model.mtp_layers.0.") for name in names):
        return "MiMo", "model.mtp_layers.", 0
    model_type = target.config.get("model_type")
    of_layer = nested(read_config(folder), "transformer_layer_config").get("model_type", model_type)
    shares = any(name.startswith(_SHARED_BY_GATED) for name in names)
    if (shares or of_layer in GATED) and model_type not in GATED:
        raise SpeculativeConfigError(
            f"{folder} has the MTP layer of a Qwen3-Next, Qwen3.5 or K-EXAONE, which guesses for these alone, "
            f"and the target is a {model_type!r}"
        )
    if any(name.startswith(f"{SPECULATORS}0.") for name in names):
        return GATED.get(str(of_layer), "speculators"), SPECULATORS, 0
    # Exports of the module alone number it anew (SGLang's NextN).
    first = 0 if "model.layers.0.eh_proj.weight" in names else target.num_layers
    if any(name.startswith(f"model.layers.{first}.") for name in names):
        if model_type not in NUMBERED:
            raise SpeculativeConfigError(f"MTP layers of model type {model_type!r} are not available; leave out method mtp")
        return NUMBERED[model_type], "model.layers.", first
    if shares:
        return GATED[str(model_type)], "mtp.layers.", 0
    if any(name.startswith(_OWN.get(str(model_type), ())) for name in names):
        return ("ERNIE-4.5", "model.mtp_block.", 0) if model_type == ERNIE else ("Nemotron 3", "mtp.layers.", 0)
    for prefix, family in _NOT_AVAILABLE.items():
        if any(name.startswith(prefix) for name in names):
            raise SpeculativeConfigError(f"{folder} has MTP layers as {family} has them ({prefix}*): known, but not available")
    announced = next((key for key in _ANNOUNCEMENTS if target.config.get(key)), None)
    if announced is not None:
        raise SpeculativeConfigError(
            f"the config of {folder} announces {target.config[announced]} MTP layers ({announced}), but their tensors are not there: "
            "conversions often leave them out; take the original checkpoint"
        )
    raise SpeculativeConfigError(f"{folder} has no MTP layers; take another method")


def _tensors(folder: Path, prefix: str) -> Mapping[str, Tensor]:
    files = [file for file in sorted(folder.glob("*.safetensors")) if not file.name.startswith("consolidated")]
    try:
        tensors = read_tensors(files)
    except WeightError as error:
        raise SpeculativeConfigError(str(error)) from None
    return named(tensors, {name: name for name in tensors if name.startswith(prefix)})
