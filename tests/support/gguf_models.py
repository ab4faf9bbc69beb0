"""Writes a model's folder as the GGUF file that llama.cpp's converter makes of it: names by its own tables, weights as it turns them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

PAIRS_SIDE_BY_SIDE = ("llama", "smollm3", "granite")


def save_gguf(
    folder: Path, file: Path, architecture: str, values: Mapping[str, Any] = {}, type: str = "F32", factors: Mapping[str, list[float]] = {}
) -> Path:
    """values: said beside the sizes. type: of matrices whose rows it fits. factors: rotary ones, by the names of their tensors."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, architecture)
    sizes = {
        "block_count": "num_hidden_layers",
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    }
    if config.get("head_dim"):
        sizes["attention.key_length"] = "head_dim"
    if (folder / "tokenizer.json").exists():
        _add_tokenizer(writer, folder)
    said = {key: config[name] for key, name in sizes.items()}
    for key, value in {**said, **values}.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array, bool: writer.add_bool}
        whole = key.startswith(("general.", "tokenizer."))
        add[value.__class__](key if whole else f"{architecture}.{key}", value)
    architectures = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(architectures[architecture], config["num_hidden_layers"])
    experts: dict[str, list[Tensor]] = {}
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in sorted((_apart(tensors) if architecture == "gpt-oss" else tensors).items()):
        if ".experts." in name and architecture != "gpt-oss":
            before, _, part = name.partition(".experts.")
            index, _, kind = part.partition(".")
            experts.setdefault(f"{before}.experts.{kind}", []).append(tensor)
            assert len(experts[f"{before}.experts.{kind}"]) == int(index) + 1
            continue
        _add(writer, names, name, _turned(name, tensor.float(), architecture, config), type)
    for name, tensors in experts.items():
        _add(writer, names, name, torch.stack(tensors).float(), type)
    for name, numbers in factors.items():
        writer.add_tensor(f"{name}.weight", np.array(numbers, np.float32))
    write(writer)
    return file


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """gpt-oss's experts, whose gates and ups take turns, and whose matrices are turned; and its sinks as weights."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        kind = "bias" if name.endswith("_bias") else "weight"
        rows = tensor.mT if tensor.dim() == 3 else tensor
        if ".experts.gate_up_proj" in name:
            for part, first in (("gate", 0), ("up", 1)):
                found[f"{name.split('gate_up')[0]}{part}_proj.{kind}"] = rows[:, first::2]
        elif ".experts.down_proj" in name:
            found[f"{name.split('down_proj')[0]}down_proj.{kind}"] = rows
        else:
            found[f"{name}.weight" if name.endswith("sinks") else name] = tensor
    return found


def _turned(name: str, tensor: Tensor, architecture: str, config: dict[str, Any]) -> Tensor:
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    if architecture in PAIRS_SIDE_BY_SIDE and any(part in name for part in ("q_proj", "k_proj")):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        return torch.cat([torch.stack(head.chunk(2), 1).flatten(0, 1) for head in tensor.chunk(heads)])
    return tensor


def _add(writer: gguf.GGUFWriter, names: gguf.TensorNameMap, name: str, tensor: Tensor, type: str) -> None:
    module, kind = name.rsplit(".", 1)
    stored, wanted = names.get_name(module), gguf.GGMLQuantizationType[type]
    assert stored is not None, name
    array = np.ascontiguousarray(tensor.numpy())
    if type == "F32" or tensor.dim() < 2 or tensor.shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0]:
        writer.add_tensor(f"{stored}.{kind}", array)
    else:
        writer.add_tensor(f"{stored}.{kind}", gguf.quants.quantize(array, wanted), raw_dtype=wanted)


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    """Of byte-level BPE that cuts as GPT-2 does."""
    whole = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    special = {token["content"] for token in whole["added_tokens"]}
    tokens = sorted(whole["model"]["vocab"], key=whole["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in whole["model"]["merges"]])
    writer.add_eos_token_id(tokens.index(config["eos_token"]))
    if (folder / "chat_template.jinja").exists():
        writer.add_chat_template((folder / "chat_template.jinja").read_text())
