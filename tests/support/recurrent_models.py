"""Small random targets whose layers are recurrent, with the embedded model's tokenizer."""

import shutil
from pathlib import Path
from typing import Any

import torch

EMBEDDED = Path(__file__).parents[2] / "engine" / "demo_model" / "target"
SIZES: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None,
}


def save_qwen3_5(folder: Path, **settings: Any) -> Path:
    """Weights that make every part matter. Leaves torch's global seed alone."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES | settings))
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.copy_(torch.randn_like(weight) * weight.shape[-1] ** -0.5)
            elif "norm" in name:
                weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(folder)
    for file in (*EMBEDDED.glob("*token*"), *EMBEDDED.glob("*.jinja")):
        shutil.copy(file, folder / file.name)
    return folder
