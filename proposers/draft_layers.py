"""The layers of a drafter as a config of transformers, made of what its checkpoint says; and how long a text they can read.

Knows no tensors. What a checkpoint leaves out is as transformers has it for the model type.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedConfig

from ..kernels.model_config import config_class
from .config_entry import SpeculativeConfigError

LAYER_SETTINGS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps"),
    *("max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
)
"""Keys of config.json that are the layers' own, not the target's."""
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
_BY_LAYER = ("sliding_attention", "full_attention")
_STRETCHED = ("default", "linear", "llama3")  # rotary embeddings that mean the same whatever length they are used with


def layer_config(kind: str, given: Mapping[str, Any], num_layers: int, num_query_rows: int, folder: Path) -> PreTrainedConfig:
    """A config of model type `kind`. num_query_rows: of the first layer's query projection, which tell a head's width where the
    settings do not. folder: for the message. Raises SpeculativeConfigError.
    """
    heads = given.get("num_attention_heads")
    has_width = "head_dim" in given or type(heads) is not int or heads < 1
    width = {} if has_width else {"head_dim": num_query_rows // cast(int, heads)}
    ropes = {key: _of_text(given[key]) for key in ("rope_scaling", "rope_parameters") if isinstance(given.get(key), Mapping)}
    return config_of(kind, {**given, **ropes, **width, "num_hidden_layers": num_layers}, folder)


def config_of(kind: str, given: Mapping[str, Any], folder: Path) -> PreTrainedConfig:
    """Of model type `kind`. folder: for the message. Raises SpeculativeConfigError."""
    try:
        return config_class(kind).from_dict({**given})
    except Exception as error:  # every config class has checks of its own
        raise SpeculativeConfigError(f"{folder}/config.json is no valid {kind} config: {error}") from error


def settings_like(own: Mapping[str, Any], target: Mapping[str, Any]) -> dict[str, Any]:
    """LAYER_SETTINGS of layers like the target's, for a config.json that says nothing of them. What it says counts with all that goes
    with it."""
    said, like = ({key: config[key] for key in LAYER_SETTINGS if config.get(key) is not None} for config in (own, target))
    told_otherwise = {*(_ROPE if not said.keys().isdisjoint(_ROPE) else ()), *(("head_dim",) if "num_attention_heads" in said else ())}
    return {key: value for key, value in like.items() if key not in told_otherwise} | said


def _of_text(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Without what places the parts of a picture (Qwen2-VL's and Qwen3-VL's mrope): in text all three positions are the same.

    A drafter has one rotary table. Where its config has the target's two, for sliding and for full layers (Gemma, Laguna),
    `speculators` trains it with that of sliding ones.
    """
    rope = next((part for kind in _BY_LAYER if isinstance(part := rope.get(kind), Mapping)), rope)
    own = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    if own.get("rope_type", own.get("type")) != "mrope":
        return own
    return {**{key: value for key, value in own.items() if key != "type"}, "rope_type": "default"}


def readable_length(hf_config: PreTrainedConfig, max_model_len: int) -> int:
    """max_model_len, the target's, because drafters are trained on short texts (2,048 positions are usual) and used on long ones.

    Fewer only where positions mean something else in a longer text.
    """
    rope = hf_config.rope_parameters or {}
    if rope.get("rope_type", "default") in _STRETCHED:
        return max_model_len
    return min(max_model_len, int(cast(Any, hf_config).max_position_embeddings))
