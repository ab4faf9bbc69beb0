"""Tiny random models, made in well under a second: a config for every lowered family, checkpoints with and without a tokenizer."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

MAX_MODEL_LEN = 512
END = "<|end|>"
SPECIAL_TOKENS = [END, "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT = [
    "The quick brown fox jumps over the lazy dog.",
    "def add(a, b):\n    return a + b\n",
    "Speculative decoding guesses the next tokens and checks them.",
] * 8


def byte_level(texts: Sequence[str], vocab_size: int, special_tokens: Sequence[str]) -> Tokenizer:
    """All 256 bytes, special tokens, and merges of these texts."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), list(special_tokens)
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(texts, trainer)
    return bpe


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    bpe = byte_level(TEXT, 300, SPECIAL_TOKENS)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=END)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_llama(folder: Path, *, hidden_size: int, num_layers: int, seed: int) -> Path:
    """Random weights, float32, with a tokenizer and a chat template. Leaves torch's global seed alone."""
    tokenizer = save_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_MODEL_LEN,
        bos_token_id=None,
        eos_token_id=SPECIAL_TOKENS.index(END),  # the trainer numbers them first
        pad_token_id=SPECIAL_TOKENS.index(END),
        initializer_range=0.2,  # wide enough that logits differ and texts do not all end at once
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,  # large enough to show
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW = 6
RECURRENT = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "lfm2", "lfm2_moe", "granite_hybrid", "granite_hybrid_moe")
"""Families with layers that keep a state: they run in batches that say where it is."""
WITH_EXPERTS = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss", "qwen3_next", "qwen3_5_moe", "glm4_moe", "lfm2_moe", "gemma4_moe")
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
LAYER_NORM = {"layer_norm_eps": 1e-3}
_PARTIAL = {"rope_theta": 100.0, "rope_type": "default", "partial_rotary_factor": 0.5}
_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default", "partial_rotary_factor": 0.5},
}
_MAMBA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
    "shared_intermediate_size": 24, "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6,
    "logits_scaling": 4.0,
}
_SHARED: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}

# What each family is known for, switched on, with values that show where they are forgotten.
_FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {}),
    "mistral": (transformers.MistralConfig, {"sliding_window": WINDOW}),
    "qwen2": (transformers.Qwen2Config, {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {
            "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
    "ministral3": (
        transformers.Ministral3Config,
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_theta": 100.0, "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "ministral": (transformers.MinistralConfig, {"head_dim": 16, "layer_types": SLIDING, "sliding_window": WINDOW}),
    "cwm": (transformers.CwmConfig, {"layer_types": SLIDING, "sliding_window": WINDOW, "mlp_bias": True, "head_dim": 16}),
    "arcee": (transformers.ArceeConfig, {}),
    "seed_oss": (transformers.SeedOssConfig, {"head_dim": 16, "mlp_bias": True}),
    "helium": (transformers.HeliumConfig, {"head_dim": 8, "attention_bias": True, "mlp_bias": True}),
    "ernie4_5": (transformers.Ernie4_5Config, {"head_dim": 16, "use_bias": True}),
    "hunyuan": (
        transformers.HunYuanDenseV1Config,
        {"head_dim": 16, "rope_parameters": {"rope_theta": 100.0, "rope_type": "dynamic", "factor": 1.0, "alpha": 3.0}},
    ),
    "glm": (transformers.GlmConfig, {"head_dim": 16}),
    "glm4": (transformers.Glm4Config, {"head_dim": 16}),
    "cohere": (transformers.CohereConfig, {**LAYER_NORM, "attention_bias": True}),
    "cohere2": (transformers.Cohere2Config, {**LAYER_NORM, "layer_types": SLIDING, "sliding_window": WINDOW}),
    "starcoder2": (transformers.Starcoder2Config, {"norm_epsilon": 1e-3, "sliding_window": WINDOW}),
    "stablelm": (transformers.StableLmConfig, {**LAYER_NORM, "use_qkv_bias": True, "rope_parameters": _PARTIAL}),
    "phi": (transformers.PhiConfig, LAYER_NORM),
    "nemotron": (transformers.NemotronConfig, {"norm_eps": 1e-3, "attention_bias": True, "mlp_bias": True}),
    "mixtral": (
        transformers.MixtralConfig,
        {"sliding_window": WINDOW, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 48},
    ),
    "qwen3_next": (transformers.Qwen3NextConfig, {**_DELTA, **_SHARED, "mlp_only_layers": [2]}),
    "qwen3_5": (transformers.Qwen3_5TextConfig, _DELTA),
    "qwen3_5_moe": (transformers.Qwen3_5MoeTextConfig, {**_DELTA, **_SHARED}),
    "lfm2": (
        transformers.Lfm2Config,
        {"layer_types": ["conv", "full_attention", "conv"], "norm_eps": 1e-3, "block_multiple_of": 8, "tie_word_embeddings": True},
    ),
    "granite_hybrid": (transformers.GraniteMoeHybridConfig, {**_MAMBA, "num_local_experts": 0}),
    "granite_hybrid_moe": (
        transformers.GraniteMoeHybridConfig,
        {
            **_MAMBA, "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 48, "position_embedding_type": "rope",
            "mamba_conv_bias": False,
        },
    ),
    "smollm3": (transformers.SmolLM3Config, {"no_rope_layer_interval": 2}),
    "granite": (
        transformers.GraniteConfig,
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6, "logits_scaling": 4.0},
    ),
    "phi3": (
        transformers.Phi3Config,
        {"sliding_window": WINDOW, "rope_parameters": {"rope_theta": 100.0, "rope_type": "default", "partial_rotary_factor": 0.5}},
    ),
    "olmo2": (transformers.Olmo2Config, {}),
    "olmo3": (transformers.Olmo3Config, {"layer_types": SLIDING, "sliding_window": WINDOW}),
    "exaone4": (transformers.Exaone4Config, {"layer_types": SLIDING, "sliding_window": WINDOW, "head_dim": 16}),
    "olmoe": (transformers.OlmoeConfig, {"num_experts": 8, "num_experts_per_tok": 4, "intermediate_size": 32}),
    "gemma": (transformers.GemmaConfig, {"head_dim": 16}),
    "gpt_oss": (
        transformers.GptOssConfig,
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 48,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False,
            },
        },
    ),
    "gemma2": (
        transformers.Gemma2Config,
        {
            "head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {
            "head_dim": 16, "sliding_window": WINDOW, "sliding_window_pattern": 3, "query_pre_attn_scalar": 12, "rope_theta": 10000.0,
            "rope_local_base_freq": 100.0,
        },
    ),
}
_UNSHARED: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    **{"sliding_window": WINDOW, "head_dim": 8, "global_head_dim": 16, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
}
if hasattr(transformers, "Gemma4TextConfig"):
    _FAMILIES["gemma4"] = (
        transformers.Gemma4TextConfig,
        {
            "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW,
            "num_kv_shared_layers": 2, "head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 97, "use_double_wide_mlp": True, "final_logit_softcapping": 5.0,
        },
    )
    _FAMILIES["gemma4_moe"] = (
        transformers.Gemma4TextConfig,
        {
            **_UNSHARED,
            **{"hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 3},
            "moe_intermediate_size": 16,
        },
    )
_ROUTED: dict[str, Any] = {
    "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "n_shared_experts": 2, "n_group": 4,
    "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
}
_RENAMED: dict[str, Any] = {
    "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "num_shared_experts": 1,
}
_LATENT: dict[str, Any] = {
    **{"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    "attention_bias": True,
}
_LATENT_EXPERTS: dict[str, Any] = {**_LATENT, **{name: value for name, value in _ROUTED.items() if name != "head_dim"}}
_LATENT_YARN = {
    **{"rope_theta": 100.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    **{"mscale": 0.7, "mscale_all_dim": 1.1},
}
_MULTIPLIED = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6, "logits_scaling": 4.0}
# The configs of these by name, for older transformers lack some.
_YOUNGER: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4_moe": ("Glm4MoeConfig", {**_ROUTED, "use_qk_norm": True, "attention_bias": True}),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {**_RENAMED, "layer_types": ["conv", "full_attention", "conv"], "norm_eps": 1e-3, "num_dense_layers": 1},
    ),
    "gemma4_unified": ("Gemma4UnifiedTextConfig", _UNSHARED),
    "bamba": ("BambaConfig", {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_state": 8, "mlp_bias": True}),
    "falcon_h1": (
        "FalconH1Config",
        {
            **{"mamba_d_ssm": 48, "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 8, "attention_in_multiplier": 0.8},
            **{"attention_out_multiplier": 0.6, "ssm_in_multiplier": 1.5, "ssm_out_multiplier": 0.7, "key_multiplier": 0.5},
            **{"ssm_multipliers": [0.5, 0.8, 1.2, 1.5, 0.9], "mlp_multipliers": [0.8, 0.6], "embedding_multiplier": 3.0},
            "lm_head_multiplier": 0.25,
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention"],
            **{"head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "layer_norm_epsilon": 1e-3},
            "time_step_min": 0.3,
            **{"n_routed_experts": 6, "num_experts_per_tok": 3, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.5},
            **{"moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 24, "moe_latent_size": 24},
        },
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        {"head_dim": 16, "rotary_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 48},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {"use_bias": True, "moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 16, "moe_num_shared_experts": 1},
    ),
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", {"num_experts": 6, "moe_topk": [3] * 3, "intermediate_size": 48, "head_dim": 16}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**_SHARED, "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {**_LATENT_EXPERTS, "q_lora_rank": None, "first_k_dense_replace": 1, "norm_topk_prob": False, "rope_parameters": _LATENT_YARN},
    ),
    "deepseek_v3": ("DeepseekV3Config", {**_LATENT_EXPERTS, "first_k_dense_replace": 1, "rope_parameters": _LATENT_YARN}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", {**_LATENT_EXPERTS, "n_group": 1, "topk_group": 1}),
    "youtu": ("YoutuConfig", _LATENT),
    "minicpm3": ("MiniCPM3Config", {**_LATENT, "attention_bias": False, "scale_emb": 3.0, "dim_model_base": 16}),
    "dots1": ("Dots1Config", {**_ROUTED, "sliding_window": WINDOW, "max_window_layers": 1, "first_k_dense_replace": 1}),
    "solar_open": ("SolarOpenConfig", {**_ROUTED, "attention_bias": True}),
    "exaone_moe": ("ExaoneMoeConfig", {**_RENAMED, "sliding_window": WINDOW, "sliding_window_pattern": 2, "n_group": 3, "topk_group": 2}),
    "hy_v3": ("HYV3Config", {**_RENAMED, "router_scaling_factor": 1.5, "attention_bias": True}),
    "afmoe": (
        "AfmoeConfig",
        {**_RENAMED, "sliding_window": WINDOW, "global_attn_every_n_layers": 2, "mup_enabled": True, "route_scale": 1.5},
    ),
    "muse_glimmer": (
        "MuseGlimmerTextConfig",
        {
            **{"head_dim": 16, "layer_types": SLIDING, "sliding_window": WINDOW, "layer_rope_theta": [100.0, 0, 100.0]},
            **{"rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}, "qk_scale_factor": 2.5, "post_norm_eps": 0.1},
            **{"output_multiplier": 0.6, "final_logit_softcapping": 5.0},
        },
    ),
    "granitemoe": ("GraniteMoeConfig", {**_MULTIPLIED, "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 48}),
    "granitemoeshared": (
        "GraniteMoeSharedConfig",
        {**_MULTIPLIED, "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 48, "shared_intermediate_size": 24},
    ),
}
_FAMILIES.update({name: (getattr(transformers, kind), own) for name, (kind, own) in _YOUNGER.items() if hasattr(transformers, kind)})
MORE = tuple(family for family in _YOUNGER if family in _FAMILIES and family not in RECURRENT)
"""Families made of what others have, under other names."""
FAMILIES = tuple(family for family in _FAMILIES if family not in (*RECURRENT, *MORE))
"""Every other family that is lowered to a program."""
_ALSO_SLOW = {
    "ministral", "cwm", "arcee", "seed_oss", "helium", "ernie4_5", "glm", "cohere", "starcoder2", "stablelm", "nemotron", "olmo3",
    "exaone4", "gemma", "ministral3", "hunyuan", "phi",
}  # fmt: skip
QUICK_FAMILIES = tuple(family for family in FAMILIES if family not in _ALSO_SLOW)
"""Those that between them have all that programs are made of."""


def tiny_config(family: str, **settings: Any) -> PreTrainedConfig:
    """A config of one of FAMILIES, RECURRENT or MORE with SIZES; settings override."""
    kind, own = _FAMILIES[family]
    merged = copy.deepcopy({**SIZES, **own, **settings})
    if "layer_types" in own and "layer_types" not in settings:
        merged["layer_types"] = merged["layer_types"][: merged["num_hidden_layers"]]
        if len(merged["layer_types"]) < len(own["layer_types"]):
            merged.pop("num_kv_shared_layers", None)
    if "vocab_size_per_layer_input" in own:
        merged["vocab_size_per_layer_input"] = merged["vocab_size"]
    return kind(**merged)


def random_model(config: PreTrainedConfig, seed: int = 0) -> Any:
    """The transformers model in float32. Every weight is random, norms and biases too, so that none can be forgotten unnoticed."""
    generator = torch.Generator().manual_seed(seed)
    of_class: Any = transformers.AutoModelForCausalLM
    config = copy.deepcopy(config)
    if config.model_type == "muse_glimmer_text":  # transformers has it as half of a whole only
        eye = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        of_class = transformers.AutoModelForImageTextToText
        config = transformers.MuseGlimmerConfig(text_config=config, vision_config=eye, out_hidden_size=128, projector_hidden_size=32)
    model: Any = of_class.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            # Gemma 4's scores are not scaled, but by what it has learned.
            parameter.data = (1 + 0.3 * noise) * (0.3 if "q_norm" in name and config.model_type.startswith("gemma4") else 1.0)
        else:
            parameter.data = noise * (0.5 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5)
    for name, buffer in model.named_buffers():
        if name.endswith(("correction_bias", "expert_bias")):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
        if "layer_scalar" in name:
            buffer.fill_(0.7)
    return model
