"""Adapters of weights that a program knows otherwise than the checkpoint does: in parts, or as the text half of a whole."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import Decoding
from random_adapters import Pairs, merged_model, pairs_for, save_adapter, with_adapters
from tiny_models import RECURRENT, random_model, save_tokenizer, tiny_config
from torch import Tensor
from variants import slow_but

from foretoken.engine.adapter_folder import read_adapter
from foretoken.engine.config import ModelConfig
from foretoken.engine.errors import ModelLoadError
from foretoken.engine.model import LoadedModel, load_model
from foretoken.kernels.adapters import AdapterBank, AdapterRoom

PROMPT = torch.randint(0, 300, (20,), generator=torch.Generator().manual_seed(1)).tolist()


def write(family: str, folder: Path) -> Path:
    random_model(tiny_config(family, vocab_size=300)).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def load(folder: Path, room: AdapterRoom | None = None) -> LoadedModel:
    return load_model(ModelConfig(str(folder), dtype="float32", executor="torch"), lambda line: None, room=room)


def scores(loaded: LoadedModel, *slots: int) -> Tensor:
    decoding = Decoding(loaded.executor)
    batch = decoding.batch([PROMPT])
    logits = loaded.executor.run(with_adapters(batch, *slots) if slots else batch, decoding.kv).logits
    assert logits is not None
    return logits


def bank_of(loaded: LoadedModel) -> AdapterBank:
    assert loaded.adapters is not None
    return loaded.adapters


@pytest.mark.parametrize("family", [*RECURRENT, "glm4", "deepseek_v3"])
@pytest.mark.parametrize("prefix", slow_but(["model."], ["model.", "model.language_model."]))
def test_it_is_as_if_it_were_merged(family: str, prefix: str, tmp_path: Path) -> None:
    """Queries lie beside their gates, what belongs to one key head together, and dimensions that turn together beside each other."""
    target = write(family, tmp_path / "target")
    pairs: Pairs = {name: pair for name, pair in pairs_for(target, 1).items() if not re.search("experts|sparse_moe|kv_b_proj", name)}
    kinds = {"qwen3_next": "linear_attn.in_proj_qkvz", "lfm2": "conv.in_proj", "lfm2_moe": "conv.in_proj", "glm4": "self_attn.k_proj"}
    kinds["deepseek_v3"] = "self_attn.kv_a_proj_with_mqa"
    parts = "mamba.in_proj" if "granite" in family else kinds.get(family, "linear_attn.in_proj_qkv")
    queries = "q_b_proj" if family == "deepseek_v3" else "q_proj"
    assert {f"model.layers.1.self_attn.{queries}.weight", f"model.layers.0.{parts}.weight"} <= pairs.keys()
    adapter = save_adapter(tmp_path / "adapter", {name.replace("model.", prefix, 1): pair for name, pair in pairs.items()})
    loaded = load(target, AdapterRoom(2, 4))
    bank = bank_of(loaded)
    bank.put(2, read_adapter(adapter, bank.shapes, bank.rank, bank.slices).pairs)
    plain, adapted = scores(load(target)), scores(load(merged_model(target, pairs, tmp_path / "merged")))
    assert (plain - adapted).abs().max() > 0.1 * adapted.abs().max()
    torch.testing.assert_close(scores(loaded, 2), adapted, rtol=1e-4, atol=5e-4)  # merging rounds, by the processor's way of summing
    torch.testing.assert_close(scores(loaded, 1), plain, rtol=1e-4, atol=1e-4)


def test_what_is_no_linear_layer_of_the_text_model_is_refused(tmp_path: Path) -> None:
    bank = bank_of(load(write("qwen3_5", tmp_path / "target"), AdapterRoom(1, 4)))
    down, up = torch.zeros(4, 32), torch.zeros(128, 4)
    wrong: dict[str, tuple[Any, str]] = {
        "model.visual.blocks.0.attn.qkv": (up, "which is no linear layer of this model"),
        "model.layers.1.self_attn.q_proj.0": (up, "which is no linear layer of this model"),
        "model.layers.1.self_attn.q_proj": (up[:64], r"are \[4, 32\] and \[64, 4\], but the layer has 32 inputs and 128 outputs"),
    }
    for module, (its, told) in wrong.items():
        folder = save_adapter(tmp_path / module, {f"{module}.weight": (down, its)})
        with pytest.raises(ModelLoadError, match=told):
            read_adapter(folder, bank.shapes, bank.rank, bank.slices)


def test_the_halves_of_latent_attention_are_refused(tmp_path: Path) -> None:
    bank = bank_of(load(write("deepseek_v3", tmp_path / "target"), AdapterRoom(1, 4)))
    module = "model.layers.0.self_attn.kv_b_proj"
    folder = save_adapter(tmp_path / "adapter", {f"{module}.weight": (torch.zeros(4, 16), torch.zeros(80, 4))})
    with pytest.raises(ModelLoadError, match=f"adapts {module}, whose halves .* merge it into its base model"):
        read_adapter(folder, bank.shapes, bank.rank, bank.slices)
