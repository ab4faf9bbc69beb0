"""A GGUF file gives the program and the tensors of the folder it was made from."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_models import save_gguf, write
from tiny_models import random_model, tiny_config

from foretoken.engine.model import read_config
from foretoken.engine.model_folder import find_folder, weight_files
from foretoken.kernels.gguf_file import GgufError, GgufFile, GgufTensor
from foretoken.kernels.quantised_checkpoint import read_quantisation
from foretoken.kernels.stored_tensors import WeightError, read_tensors, sliced, without_numbers
from foretoken.kernels.weights import network_program

LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0}
NEAR = {"rope_type": "default", "rope_theta": 100.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 100.0, "beta_fast": 16.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 32, "partial_rotary_factor": 0.5,
    "long_factor": [1.5, 3.0], "short_factor": [1.0, 1.25],
}
SLIDING = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
# architecture, family, settings of it, and what the file says of these
MODELS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("llama", "llama", {}, {}),
    ("llama", "llama", {"rope_parameters": LINEAR}, {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base": 1000.0}),
    ("smollm3", "smollm3", {"rope_parameters": NEAR, "no_rope_layer_interval": 4, "num_hidden_layers": 5}, {"rope.freq_base": 100.0}),
    ("granite", "granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 4.0, "attention_multiplier": 0.25},
     {"embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 4.0, "attention.scale": 0.25}),
    ("qwen2", "qwen2", {"use_sliding_window": False}, {}),
    ("qwen3", "qwen3", {"rope_parameters": YARN, "tie_word_embeddings": True},
     {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16,
      "rope.scaling.yarn_beta_fast": 16.0, "rope.freq_base": 100.0}),
    ("qwen3moe", "qwen3_moe", {"mlp_only_layers": []},
     {"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 16}),
    ("gpt-oss", "gpt_oss", {},
     {"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 48, "attention.sliding_window": 6, "rope.freq_base": 1e4,
      "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}),
    ("phi3", "phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 32, "sliding_window": 6},
     {"rope.freq_base": 100.0, "rope.dimension_count": 4, "rope.scaling.original_context_length": 32, "attention.sliding_window": 6}),
    ("gemma", "gemma", {"head_dim": 16}, {}),
    ("gemma2", "gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6, "attn_logit_softcapping": 20.0,
                          "final_logit_softcapping": 10.0, "layer_types": None},
     {"attention.sliding_window": 6, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}),
    ("gemma3", "gemma3", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6, "num_hidden_layers": 7, "layer_types": SLIDING,
                          "rope_parameters": {"full_attention": LINEAR, "sliding_attention": NEAR}},
     {"attention.sliding_window": 6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base": 1000.0,
      "rope.freq_base_swa": 100.0}),
]


def folder_of(file: Path) -> Path:
    return find_folder(str(file), None, lambda line: None)


@pytest.mark.parametrize(("architecture", "family", "settings", "values"), MODELS)
def test_program_and_tensors(tmp_path: Path, architecture: str, family: str, settings: dict[str, Any], values: dict[str, Any]):
    random_model(tiny_config(family, **settings)).save_pretrained(tmp_path / "folder")
    longrope = {f"rope_factors_{kind}": LONG[f"{kind}_factor"] for kind in ("long", "short")} if family == "phi3" else {}
    folder = folder_of(save_gguf(tmp_path / "folder", tmp_path / "model.gguf", architecture, values, factors=longrope))
    program = network_program(read_config(tmp_path / "folder"))
    expected, found = (sliced(read_tensors(weight_files(place)), program.slices) for place in (tmp_path / "folder", folder))
    assert network_program(read_config(folder)) == program
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name].float(), tensor.float(), rtol=0, atol=1e-6)


def test_llama_3s_rotary_factors(tmp_path: Path):
    """They are a tensor, which nobody must take for a weight, nor leave aside."""
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    plain, scaled = (tiny_config("llama", rope_parameters=kind | {"rope_theta": 100.0}) for kind in ({"rope_type": "default"}, llama3))
    factors = [fast / slow for fast, slow in zip(frequencies(plain), frequencies(scaled), strict=True)]
    random_model(plain).save_pretrained(tmp_path / "folder")
    file = save_gguf(tmp_path / "folder", tmp_path / "model.gguf", "llama", {"rope.freq_base": 100.0}, factors={"rope_freqs": factors})
    assert frequencies(read_config(folder_of(file))) == pytest.approx(frequencies(scaled))
    assert read_tensors([file]).keys() == read_tensors(weight_files(tmp_path / "folder")).keys()


def frequencies(config: Any) -> tuple[float, ...]:
    (rope,) = network_program(config).ropes.values()
    assert rope.attention_factor == 1
    return rope.inv_freq


@pytest.mark.parametrize("type", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "IQ4_XS", "BF16", "F16"])
def test_numbers_are_those_of_the_library(type: str):
    """In slices, and of one matrix of several."""
    kind = gguf.GGMLQuantizationType[type]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    stored = np.random.default_rng(0).integers(0, 124, (3, 1500, 512 // block * size), np.uint8)
    expected = torch.from_numpy(gguf.quants.dequantize(stored, kind))
    tensor = GgufTensor(stored.ravel(), kind, (3, 1500, 512))
    assert torch.equal(tensor.plain().float(), expected) and torch.equal(tensor.plain(2).float(), expected[2])
    assert tensor.is_quantised == (type not in ("BF16", "F16")) and tensor.bits == 8 * size / block


@pytest.mark.parametrize(("type", "bits"), [("Q8_0", 8), ("Q4_0", 4), ("F16", None)])
def test_how_wide_the_layers_are(tmp_path: Path, type: str, bits: int | None):
    random_model(tiny_config("qwen3_moe", mlp_only_layers=[], intermediate_size=64)).save_pretrained(tmp_path / "folder")
    file = save_gguf(tmp_path / "folder", tmp_path / "model.gguf", "qwen3moe", dict(MODELS[6][3]), type)
    found = read_quantisation(folder_of(file))
    assert (found and found.bits) == bits
    name = "model.layers.1.mlp.experts.4.up_proj.weight"
    tensors, whole = read_tensors([file]), read_tensors(weight_files(tmp_path / "folder"))
    assert without_numbers(tensors, name).dtype == tensors[name].dtype  # whose bytes are told while it is read
    assert relative_error(tensors[name].float(), whole[name]) < {"Q8_0": 0.01, "Q4_0": 0.12, "F16": 0.001}[type]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_damage_is_told(tmp_path: Path):
    random_model(tiny_config("qwen2", use_sliding_window=False)).save_pretrained(tmp_path / "folder")
    whole = save_gguf(tmp_path / "folder", tmp_path / "whole.gguf", "qwen2").read_bytes()
    generator = np.random.default_rng(0)
    for number in range(200):
        file, damaged = tmp_path / f"{number}.gguf", bytearray(whole)
        if number % 2:
            del damaged[int(generator.integers(len(whole) - 1)) :]
        for place in generator.integers(0, 2000, 3):
            damaged[min(int(place), len(damaged) - 1)] = int(generator.integers(256))
        file.write_bytes(damaged)
        try:
            GgufFile([file])  # what is changed may be a text, or a number that may be so
        except GgufError as error:
            assert str(file) in str(error)
    writer = gguf.GGUFWriter(tmp_path / "integers.gguf", "llama")
    writer.add_tensor("x", np.zeros(4, np.int32))
    write(writer)
    with pytest.raises(GgufError, match="numbers of type I32, which are not read"):
        GgufFile([tmp_path / "integers.gguf"])
    (tmp_path / "half.gguf").write_bytes(whole[:-100])
    with pytest.raises(WeightError, match="half.gguf is no GGUF file.*it ends at byte"):
        read_tensors([tmp_path / "half.gguf"])
