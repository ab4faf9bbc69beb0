"""Models in GGUF files: an architecture's settings and tensors under the names, and in the forms, that transformers has for them.

What llama.cpp's converters do to weights is undone: Llama's rotary pairs, which they lay side by side, and Gemma's norms, to which they
add one.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .gguf_file import FLOAT32, GgufError, GgufFile, GgufTensor

_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in ("q", "k", "v", "qkv")},
    **{f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_gate_inp": "mlp.gate",
    **{f"ffn_{part}_exps": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")},
}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GATES, _UPS = "ffn_gate_exps.bias", "ffn_up_exps.bias"  # one tensor in transformers
_GPT_OSS = {
    "attn_sinks.weight": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
    **{f"ffn_{part}_exps.weight": f"mlp.experts.{{}}.{part}" for part in ("gate", "up", "down")},  # as its program has them
    "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
_ROTARY_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # settings that are stored as tensors
_PARTS = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """What config.json would say of this model. Raises GgufError for one that is not read."""
    settings = _Settings(file)
    name = str(file.values.get("general.architecture"))
    architecture = _ARCHITECTURES.get(name)
    if architecture is None or (settings.get("expert_count") and not architecture.has_experts):
        what = f"a {name} with experts" if architecture else f"architecture {name}"
        raise GgufError(f"{file.path} has {what}, which is read from safetensors only; of GGUF files {', '.join(_ARCHITECTURES)} are read")
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "architectures": [f"{architecture.class_name}ForCausalLM"],
        "vocab_size": file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else 0,
        "hidden_size": settings["embedding_length"],
        "intermediate_size": settings["feed_forward_length"],
        "num_hidden_layers": settings["block_count"],
        "num_attention_heads": settings.heads["q"],
        "num_key_value_heads": settings.heads["k"],
        "max_position_embeddings": settings["context_length"],
        "rms_norm_eps": settings["attention.layer_norm_rms_epsilon"],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "head_dim": settings.head_dim,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "rope_parameters": settings.rotary(),
        "dtype": "bfloat16",
    }
    config |= architecture.own(settings)
    if bits := _bits(file):
        config["quantization_config"] = {"quant_method": "gguf", "bits": bits}
    return config


class GgufWeights:
    """The tensors of a model by the names that transformers has for them."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Raises GgufError."""
        file = GgufFile(files)
        self._heads = _Settings(file).heads
        self._architecture = _ARCHITECTURES[str(file.values.get("general.architecture"))]
        self.stored: dict[str, tuple[GgufTensor, int | None]] = {}  # name -> what is stored, and which of several that is
        for stored_name, tensor in file.tensors.items():
            if stored_name.endswith(_GATES) and (ups := file.tensors.get(stored_name.replace(_GATES, _UPS))) is not None:
                tensor = _in_turn(tensor, ups)
            if stored_name not in _ROTARY_FACTORS and not stored_name.endswith(_UPS):
                name = self._name(stored_name)
                if "{}" in name:
                    self.stored |= {name.format(index): (tensor, index) for index in range(tensor.shape[0])}
                else:
                    self.stored[name] = tensor, None

    def shape(self, name: str) -> tuple[int, ...]:
        tensor, index = self.stored[name]
        return tensor.shape if index is None else tensor.shape[1:]

    def plain(self, name: str) -> Tensor:
        tensor, index = self.stored[name]
        numbers = tensor.plain(index)
        if self._architecture.norms_plus_one and name.endswith("norm.weight"):
            return numbers - 1
        if self._architecture.pairs_side_by_side and (part := re.search(r"\.([qk])_proj\.", name)):
            return numbers.unflatten(0, (self._heads[part[1]], -1, 2)).transpose(1, 2).flatten(0, 2)
        return numbers

    def _name(self, stored: str) -> str:
        """As it is called in the file if it is none that the architecture has: then it is one too many there."""
        match = _PARTS.fullmatch(stored)
        if match is None:
            return stored
        layer, part, kind = match.groups()
        if layer is None:
            return f"{_WHOLE[part]}.{kind}" if part in _WHOLE else stored
        names = {**_OF_LAYER, **self._architecture.names}
        name = names.get(f"{part}.{kind}") or (f"{names[part]}.{kind}" if part in names else None)
        return f"model.layers.{layer}.{name}" if name else stored


def _in_turn(first: GgufTensor, second: GgufTensor) -> GgufTensor:
    """[n, 2 width] of two [n, width]: one number of each, over and over."""
    numbers = torch.stack((first.plain().float(), second.plain().float()), -1).flatten(-2)
    return GgufTensor(numbers.numpy().view(np.uint8).ravel(), FLOAT32, tuple(numbers.shape))


class _Settings:
    """What a file says under the name of its architecture."""

    def __init__(self, file: GgufFile) -> None:
        self._file, self._prefix = file, f"{file.values.get('general.architecture')}."

    def __getitem__(self, key: str) -> Any:
        if (found := self.get(key)) is None:
            raise GgufError(f"{self._file.path} does not say {self._prefix}{key}")
        return found

    def get(self, key: str, default: Any = None) -> Any:
        found = self._file.values.get(self._prefix + key, default)
        if isinstance(found, list):  # one for each layer
            if len(set(found)) != 1:
                raise GgufError(f"{self._file.path} has layers that differ in {key}, which is not read")
            return found[0]
        return found

    @property
    def heads(self) -> dict[str, int]:
        """Of queries and of keys."""
        queries = self["attention.head_count"]
        return {"q": queries, "k": self.get("attention.head_count_kv", queries)}

    @property
    def head_dim(self) -> int:
        return self.get("attention.key_length") or self["embedding_length"] // self["attention.head_count"]

    def factors(self, name: str) -> list[float] | None:
        tensor = self._file.tensors.get(name)
        return None if tensor is None else tensor.plain().float().tolist()

    def rotary(self) -> dict[str, Any]:
        theta = {"rope_theta": self.get("rope.freq_base", 10000.0)}
        if (factors := self.factors(_ROTARY_FACTORS[0])) is not None:  # Llama 3's, worked out: what the pairs turn slower by
            always = {"long_factor": factors, "short_factor": factors, "original_max_position_embeddings": self["context_length"]}
            return theta | always | {"rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0}
        kind, original = self.get("rope.scaling.type", "none"), self.get("rope.scaling.original_context_length")
        if kind in ("none", "longrope"):
            return theta | {"rope_type": "default"}
        scaling = {"factor": self["rope.scaling.factor"], "original_max_position_embeddings": original}
        scaling |= {key: self.get(f"rope.scaling.yarn_{key}") for key in ("beta_fast", "beta_slow")}
        scaling["attention_factor"] = self.get("rope.scaling.yarn_attn_factor")
        return theta | {"rope_type": kind} | {key: value for key, value in scaling.items() if value is not None}


def _phi3(settings: _Settings) -> dict[str, Any]:
    original, width = settings.get("rope.scaling.original_context_length", settings["context_length"]), settings.head_dim
    rotary = settings.rotary() | {"partial_rotary_factor": settings.get("rope.dimension_count", width) / width}
    if (long := settings.factors(_ROTARY_FACTORS[1])) is not None:
        rotary |= {"rope_type": "longrope", "long_factor": long, "short_factor": settings.factors(_ROTARY_FACTORS[2])}
        rotary["original_max_position_embeddings"] = original
    window = settings.get("attention.sliding_window") or None
    return {"rope_parameters": rotary, "original_max_position_embeddings": original, "sliding_window": window}


def _granite(settings: _Settings) -> dict[str, Any]:
    scales = {"embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale"}
    multipliers = {name: settings.get(key, 1.0) for name, key in scales.items()}
    return multipliers | {"attention_multiplier": settings.get("attention.scale", settings.head_dim**-0.5)}


def _qwen3_moe(settings: _Settings) -> dict[str, Any]:
    return {
        "num_experts": settings["expert_count"],
        "num_experts_per_tok": settings["expert_used_count"],
        "moe_intermediate_size": settings["expert_feed_forward_length"],
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gpt_oss(settings: _Settings) -> dict[str, Any]:
    return {
        "num_local_experts": settings["expert_count"],
        "num_experts_per_tok": settings["expert_used_count"],
        "intermediate_size": settings["expert_feed_forward_length"],
        "sliding_window": settings["attention.sliding_window"],
        "rope_parameters": settings.rotary() | {"truncate": False},
    }


def _gemma(settings: _Settings) -> dict[str, Any]:
    return {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}


def _gemma2(settings: _Settings) -> dict[str, Any]:
    largest = settings["block_count"] == 46  # whose queries are scaled by another width (27B)
    return _gemma(settings) | {
        "query_pre_attn_scalar": settings["embedding_length"] // settings["attention.head_count"] if largest else settings.head_dim,
        "attn_logit_softcapping": settings.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": settings.get("final_logit_softcapping", 30.0),
        "sliding_window": settings.get("attention.sliding_window", 4096),
    }


def _gemma3(settings: _Settings) -> dict[str, Any]:
    largest = settings["block_count"] == 62  # 27B
    window = settings.get("attention.sliding_window")
    is_full = [window is None or layer % 6 == 5 for layer in range(settings["block_count"])]
    near = {"rope_type": "default", "rope_theta": settings.get("rope.freq_base_swa", 10000.0)}
    return _gemma(settings) | {
        "query_pre_attn_scalar": settings["embedding_length"] // settings["attention.head_count"] if largest else settings.head_dim,
        "final_logit_softcapping": settings.get("final_logit_softcapping"),
        "sliding_window": window,
        "layer_types": ["full_attention" if full else "sliding_attention" for full in is_full],
        "rope_parameters": {"full_attention": settings.rotary(), "sliding_attention": near},
    }


@dataclass(frozen=True)
class _Architecture:
    model_type: str
    class_name: str
    own: Callable[[_Settings], dict[str, Any]] = lambda settings: {}  # settings beside the usual, and instead of them
    names: Mapping[str, str] = field(default_factory=dict)  # the same of names, of a part or of one of its tensors
    pairs_side_by_side: bool = False  # rotary pairs of queries and keys
    norms_plus_one: bool = False
    has_experts: bool = False


_ARCHITECTURES = {
    "llama": _Architecture("llama", "Llama", pairs_side_by_side=True),
    "smollm3": _Architecture("smollm3", "SmolLM3", pairs_side_by_side=True),
    "granite": _Architecture("granite", "Granite", _granite, pairs_side_by_side=True),
    "qwen2": _Architecture("qwen2", "Qwen2"),
    "qwen3": _Architecture("qwen3", "Qwen3"),
    "qwen3moe": _Architecture("qwen3_moe", "Qwen3Moe", _qwen3_moe, has_experts=True),
    "gpt-oss": _Architecture("gpt_oss", "GptOss", _gpt_oss, _GPT_OSS, has_experts=True),
    "phi3": _Architecture("phi3", "Phi3", _phi3, {"ffn_up": "mlp.gate_up_proj"}),
    "gemma": _Architecture("gemma", "Gemma", _gemma, norms_plus_one=True),
    "gemma2": _Architecture("gemma2", "Gemma2", _gemma2, _FOUR_NORMS, norms_plus_one=True),
    "gemma3": _Architecture("gemma3_text", "Gemma3", _gemma3, _FOUR_NORMS, norms_plus_one=True),
}


def _bits(file: GgufFile) -> int:
    """As many as most weights of the layers have, scales apart: 4 or 8; 0 = they are plain."""
    weights: Counter[float] = Counter()
    for name, tensor in file.tensors.items():
        if name.startswith("blk.") and len(tensor.shape) > 1:
            weights[tensor.bits if tensor.is_quantised else 0] += math.prod(tensor.shape)
    most = weights.most_common(1)[0][0] if weights else 0
    return 0 if most == 0 else 4 if most <= 5 else 8
