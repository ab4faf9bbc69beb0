"""Rotary frequencies of a Hugging Face config. The scaling rules are transformers' own; only the choice among them is here."""

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .program import RopeTable

_SCALED = ("linear", "llama3", "yarn", "longrope")  # "dynamic" changes all frequencies, cached keys too, where a sequence grows on


class UnsupportedModel(ValueError):
    """The config asks for something that no program has; the model may still run as the transformers model itself."""


def rope_table(hf_config: PreTrainedConfig, head_dim: int, max_model_len: int, layer_type: str | None = None) -> RopeTable:
    """The table for all sequences up to max_model_len. Raises UnsupportedModel for unknown scaling, or dynamic one that would set in.

    layer_type: the layers it is for, where the config has a table for each type. A partial_rotary_factor shortens the table:
    the rest of each head does not turn.

    LongRoPE (Ding et al. 2024) has frequencies for short and for long sequences, and transformers changes over, for cached
    keys too late, when a sequence passes the original length. As in vLLM, max_model_len decides once: longer than the
    original length means long frequencies for every sequence, so that a key never depends on what follows it.
    """
    hf_config.standardize_rope_params()
    every_type = hf_config.rope_parameters
    parameters = (every_type or {}).get(layer_type) if layer_type else every_type
    if not isinstance(parameters, dict) or "rope_theta" not in parameters:
        raise UnsupportedModel(f"rotary embedding differs by layer or is missing: {parameters}")
    theta = parameters["rope_theta"]
    if type(theta) not in (int, float) or not theta > 0:
        raise UnsupportedModel(f"rope_theta must be a number above 0, not {theta!r}")
    share = parameters.get("partial_rotary_factor", 1.0)
    if type(share) not in (int, float) or not 0 < share <= 1 or head_dim < 1:
        raise UnsupportedModel(f"partial_rotary_factor {share!r} of heads of {head_dim}")
    rope_type = parameters.get("rope_type", "default")
    if rope_type == "dynamic" and (alpha := parameters.get("alpha")):
        # Hunyuan's checkpoints call a base that is stretched once and for all by this name.
        theta, rope_type = theta * alpha ** (head_dim / (head_dim - 2)), "default"
    elif rope_type == "dynamic" and max_model_len <= hf_config.get_text_config().max_position_embeddings:
        rope_type = "default"  # until a text is longer
    if rope_type == "default":
        width = int(head_dim * share)
        exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
        return RopeTable(tuple((1.0 / theta ** exponents).tolist()))
    if rope_type == "proportional":  # a share of the pairs turns, as slowly as if all did
        turning = int(share * head_dim // 2)
        slowness = theta ** (torch.arange(0, 2 * turning, 2, dtype=torch.float32) / head_dim) * parameters.get("factor", 1.0)
        return RopeTable((*(1.0 / slowness).tolist(), *[0.0] * (head_dim // 2 - turning)))
    if rope_type not in _SCALED:
        raise UnsupportedModel(f"rotary scaling {rope_type!r}")
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[rope_type](
        hf_config, torch.device("cpu"), seq_len=max_model_len, layer_type=layer_type
    )
    return RopeTable(tuple(inv_freq.tolist()), float(attention_factor))
