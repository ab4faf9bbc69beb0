"""Models to measure: checkpoints of real shapes with random weights, made once and kept in a cache folder.

Speed depends on shapes alone, so nothing is downloaded. Knows no executor.
"""

import json
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from ...kernels.decoder import decoder_program
from ..cache_folder import written_whole
from ..config import DEMO_MODEL
from ..model_folder import find_folder

DEVIATION = 0.05  # of the random weights; wide enough that logits differ
MAX_POSITIONS = 8192
END, PAD = 2, 3  # ids of the embedded model's tokenizer, which is everybody's here
DRAFT_LAYERS = 6
DAMPED = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
DAMPING = 0.1
TOKENIZER_FILES = ("tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class Shape:
    """A model to make: what its config.json says beyond the common part."""

    title: str
    model_type: str
    architecture: str
    config: Mapping[str, int | bool]
    seed: int


SHAPES = {
    "M1": Shape(
        "M1, Llama, 24M parameters", "llama", "LlamaForCausalLM", {
            "hidden_size": 384, "num_hidden_layers": 8, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 1536,
            "vocab_size": 8192, "tie_word_embeddings": False,
        }, 0,
    ),
    "M2": Shape(
        "M2, SmolLM2-135M's shape", "llama", "LlamaForCausalLM", {
            "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536,
            "vocab_size": 49152, "tie_word_embeddings": True,
        }, 1,
    ),
    "M3": Shape(
        "M3, Qwen2.5-0.5B's shape", "qwen2", "Qwen2ForCausalLM", {
            "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864,
            "vocab_size": 151936, "tie_word_embeddings": True,
        }, 2,
    ),
    "M4": Shape(
        "M4, a Qwen3-MoE of 0.7B parameters, 0.2B of them a token's", "qwen3_moe", "Qwen3MoeForCausalLM", {
            "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
            "intermediate_size": 3072, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "norm_topk_prob": True,
            "vocab_size": 49152, "tie_word_embeddings": True,
        }, 3,
    ),
    "M5": Shape(
        "M5, Qwen3.5-0.8B's shape, three of four layers recurrent", "qwen3_5_text", "Qwen3_5ForCausalLM", {
            "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
            "intermediate_size": 3584, "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "vocab_size": 248320, "tie_word_embeddings": True,
        }, 4,
    ),
}


@dataclass(frozen=True)
class Model:
    """A folder to measure and what to call it."""

    name: str
    title: str
    folder: Path


def find_model(name: str, cache: Path, progress: Callable[[str], None]) -> Model:
    """M1 to M5 (made if need be), demo (the embedded model) or the folder of a model. Raises ModelLoadError for no such folder."""
    if name in SHAPES:
        return Model(name, SHAPES[name].title, _made(cache / name, lambda folder: make(SHAPES[name], folder), progress))
    if name == "demo":
        return Model(name, "the embedded model", find_folder(DEMO_MODEL, None, progress))
    folder = find_folder(name, None, progress)
    return Model(folder.name, str(folder), folder)


def draft_pair(shape: Shape, cache: Path, progress: Callable[[str], None]) -> tuple[Path, Path]:
    """A target whose layers from the 7th on change little, and a draft of its first six with the same embedding and head."""
    target = _made(cache / "pair-target", lambda folder: make(shape, folder, _damped), progress)
    small = Shape(shape.title, shape.model_type, shape.architecture, {**shape.config, "num_hidden_layers": DRAFT_LAYERS}, shape.seed)
    return target, _made(cache / "pair-draft", lambda folder: make(small, folder), progress)


def make(shape: Shape, folder: Path, change: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor) -> None:
    """Write a checkpoint in bfloat16. A tensor depends on its name and the seed alone: fewer layers are the same layers."""
    config = _config(shape)
    program = decoder_program(config)
    sizes = {name: size for name, size in program.weights.items() if name not in program.slices}
    sizes |= {rows.tensor: rows.shape for rows in program.slices.values()}
    tensors = {name: change(name, _random(name, size, shape.seed)) for name, size in sizes.items()}
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END, "pad_token_id": PAD}))
    _save_tokenizer(folder, int(shape.config["vocab_size"]))


def _config(shape: Shape) -> PreTrainedConfig:
    common: dict[str, Any] = {
        "architectures": [shape.architecture],
        "max_position_embeddings": MAX_POSITIONS,
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "dtype": "bfloat16",
    }
    return AutoConfig.for_model(shape.model_type, **common, **shape.config)


def _random(name: str, size: tuple[int, ...], seed: int) -> Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(size, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return (torch.randn(size, generator=generator) * DEVIATION).bfloat16()


def _damped(name: str, tensor: Tensor) -> Tensor:
    parts = name.split(".")  # model.layers.6.mlp.down_proj.weight
    is_late = "layers" in parts and int(parts[2]) >= DRAFT_LAYERS
    return (tensor.float() * DAMPING).bfloat16() if is_late and name.endswith(DAMPED) else tensor


def _save_tokenizer(folder: Path, vocab_size: int) -> None:
    """The embedded model's tokenizer with made-up words behind its own, so that every id of the vocabulary is some text."""
    source = find_folder(DEMO_MODEL, None, lambda line: None)
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    # An added token keeps its id only if the vocabulary holds it too: others are numbered behind its end.
    vocabulary |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    known = len(vocabulary)
    assert known <= vocab_size, "the embedded tokenizer has more tokens than the model"
    vocabulary |= {f"\u0120w{number}": number for number in range(known, vocab_size)}  # U+0120: a space in byte-level BPE
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    for name in TOKENIZER_FILES:
        shutil.copy(source / name, folder / name)


def _made(folder: Path, write: Callable[[Path], None], progress: Callable[[str], None]) -> Path:
    if not folder.is_dir():
        progress(f"making {folder}")
        written_whole(folder, write)
    return folder
