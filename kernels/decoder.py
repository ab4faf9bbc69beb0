"""Decoders as programs: which Hugging Face configs can be lowered, for targets and draft models alike.

What a family looks like stands in families.py. Knows no tensors and no executor.
"""

import copy
from typing import Any

import torch
from transformers import PreTrainedConfig

from .config_limits import entry, max_positions
from .families import FAMILIES
from .model_config import config_class
from .program import Program
from .recurrent_builder import RecurrentBuilder
from .rope import UnsupportedModel

COMPOSITES = (
    "qwen3_5", "qwen3_5_moe", "gemma3", "mistral3", "llava", "llava_next", "internvl", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v",
    "glm46v", "lfm2_vl", "gemma4", "llava_onevision", "idefics3", "smolvlm", "glm4v_moe", "gemma4_unified",
    "muse_glimmer",
)
"""Model types that, where there is nothing to see, are what their text_config says and nothing else."""
OTHER_NAMES = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
    "exaone": "llama",
    "internlm3": "llama",
    "iquestcoder": "llama",
}
"""What is a family under another name. Text halves share frequencies out to three positions of a token, which of text are one."""


def text_half(hf_config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the text model in one that can see as well, under its family's name, where decoder_program understands that; else
    the config as it is."""
    is_alone = hf_config.model_type in OTHER_NAMES
    text = _renamed(hf_config if is_alone else entry(hf_config, "text_config"))
    made_for = next(iter(entry(hf_config, "architectures") or ()), "ForConditionalGeneration")
    if not (is_alone or hf_config.model_type in COMPOSITES) or not made_for.endswith(("ForConditionalGeneration", "ForCausalLM")):
        return hf_config
    if not isinstance(text, PreTrainedConfig) or text.model_type not in FAMILIES:
        return hf_config
    half: Any = copy.deepcopy(text)
    half.architectures = [FAMILIES[text.model_type][0]]
    # Whichever says so: a head of its own is noticed among the tensors.
    half.tie_word_embeddings = any(entry(config, "tie_word_embeddings") for config in (hf_config, text))
    return half if supports(half) else hf_config


def _renamed(text: Any) -> Any:
    """The config under the name that its family has alone."""
    if not isinstance(text, PreTrainedConfig) or text.model_type not in OTHER_NAMES:
        return text
    settings = {name: value for name, value in text.to_dict().items() if name != "model_type"}
    # What one name leaves out is not what the other does.
    settings.setdefault("head_dim", text.hidden_size // text.num_attention_heads)
    rope = {"partial_rotary_factor": 1.0, **(settings.get("rope_parameters") or {})}
    settings["rope_parameters"] = {name: value for name, value in rope.items() if not name.startswith("mrope")}
    return config_class(OTHER_NAMES[text.model_type])(**settings)


def supports(hf_config: PreTrainedConfig) -> bool:
    """Whether decoder_program understands this config. Whatever is odd about it, the answer is False, not an exception."""
    try:
        decoder_program(hf_config).buffers  # noqa: B018  computing them checks that the sizes fit together
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError):  # UnsupportedModel is a ValueError
        return False
    return True


def decoder_program(hf_config: PreTrainedConfig, max_model_len: int | None = None, dtype: torch.dtype = torch.float32) -> Program:
    """The program of a checkpoint of a family in FAMILIES, one op for each step of its paper. Raises UnsupportedModel.

    max_model_len: positions it is to run with, by default all that it was made for. dtype: number format it is to run in, to
    which some families round their constants.
    """
    if hf_config.model_type not in FAMILIES:
        raise UnsupportedModel(f"model type {hf_config.model_type!r}")
    architecture, family = FAMILIES[hf_config.model_type]
    config = hf_config.to_dict()
    said = config.get("architectures") or [architecture]
    if str(said).lower() != str([architecture]).lower():  # K-EXAONE: ExaoneMoE
        raise UnsupportedModel(f"architectures {said}")
    return family(RecurrentBuilder(hf_config, max_model_len or max_positions(hf_config), dtype))
