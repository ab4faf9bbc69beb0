"""A tiny Gemma 4 with random weights, and assistants for it as transformers saves them."""

import json
from pathlib import Path
from typing import Any

import torch
from tiny_models import save_tokenizer, tiny_config
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
    Gemma4UnifiedTextConfig,
)

WINDOW, K, MAX_MODEL_LEN = 24, 4, 128


def save_target(folder: Path) -> Path:
    """The last of two layers of each kind share what the first have written."""
    save_tokenizer(folder)
    config: Any = tiny_config("gemma4", vocab_size=300, max_position_embeddings=MAX_MODEL_LEN, sliding_window=WINDOW)
    torch.manual_seed(1)
    model = Gemma4ForCausalLM(config)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, *((1.0, 0.2) if "norm" in name else (0.0, 0.25)))
    model.save_pretrained(folder)
    return folder


def save_assistant(folder: Path, is_unified: bool = False, **settings: Any) -> Path:
    """Three layers, is_unified: as the 12B's; all clusters are looked at, if there are any, so that its head is one over all tokens."""
    layers: dict[str, Any] = {
        **{"vocab_size": 300, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_kv_shared_layers": 3},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "rms_norm_eps": 1e-3},
        **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "max_position_embeddings": MAX_MODEL_LEN},
        **{"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": WINDOW},
    }
    sizes: dict[str, Any] = {"backbone_hidden_size": 32, "num_centroids": 30, "centroid_intermediate_top_k": 30, **settings}
    torch.manual_seed(2)
    if is_unified:
        text = Gemma4UnifiedTextConfig(**{name: size for name, size in layers.items() if "per_layer" not in name})
        model: Any = Gemma4UnifiedAssistantForCausalLM(Gemma4UnifiedAssistantConfig(text_config=text, **sizes))
    else:
        model = Gemma4AssistantForCausalLM(Gemma4AssistantConfig(text_config=Gemma4TextConfig(**layers), **sizes))
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, *((1.0, 0.2) if "norm" in name else (0.0, 0.3)))
    for name, buffer in model.named_buffers():
        if "layer_scalar" in name:
            buffer.fill_(0.7)
    if model.masked_embedding is not None:
        model.masked_embedding.token_ordering.copy_(torch.randperm(300))
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"num_assistant_tokens": K}))
    return folder
