import json
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from decoding import Decoding
from pairs import random_tokens
from quantised_checkpoints import FORMATS, LINEAR, quantise
from safetensors.torch import load_file, save_file
from tiny_models import random_model, tiny_config

from foretoken.kernels.execution import Execution
from foretoken.kernels.model_config import read_model_config
from foretoken.kernels.quantised_checkpoint import Quantisation, UnsupportedQuantisation, plain, read_quantisation
from foretoken.kernels.stored_tensors import WeightError, read_tensors, shape_of
from foretoken.kernels.weights import load_program_executor

PROMPT = random_tokens(3, 12, 97)
ROUNDED = {
    None: Quantisation("gptq", 4, zeros_less_one=True), "auto_round:auto_gptq": Quantisation("gptq", 4, zeros_less_one=True),
    "auto_round:gptqmodel": Quantisation("gptq", 4), "auto_round:auto_awq": Quantisation("awq", 4),
    "auto_round:llm_compressor": Quantisation("compressed-tensors", 4),
}
"""What AutoRound calls a packing -> whose it is."""
FAST = ("fp8", "w4a16-asymmetric", "awq", "gptq")


def logits(folder: Path, family: str) -> torch.Tensor:
    execution = Execution(torch.float32, prefer_native=False)
    executor = load_program_executor(read_tensors([folder / "model.safetensors"]), read_model_config(folder, family), execution)
    found = Decoding(executor).feed([PROMPT]).logits
    assert found is not None
    return found


def twins(folder: Path, family: str, name: str, which: re.Pattern[str] = LINEAR, **saving: Any) -> tuple[Path, Path]:
    """A quantised checkpoint, and one with the same numbers in plain."""
    quantised, plain = folder / "quantised", folder / "plain"
    for place in (quantised, plain):
        random_model(tiny_config(family)).save_pretrained(place, **saving)
    save_file(dict(quantise(quantised, name, which)), plain / "model.safetensors", metadata={"format": "pt"})
    return quantised, plain


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in FORMATS])
def test_a_quantised_checkpoint_computes_what_its_plain_twin_does(tmp_path: Path, name: str) -> None:
    quantised, plain = twins(tmp_path, "qwen3", name)
    torch.testing.assert_close(logits(quantised, "qwen3"), logits(plain, "qwen3"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("family", "fused"), [("qwen3_moe", False), ("qwen3_moe", True), ("qwen3_next", False), ("phi3", False)])
def test_experts_and_weights_that_lie_side_by_side(tmp_path: Path, family: str, fused: bool) -> None:
    """The head is quantised as well."""
    which = re.compile(r"layers\..*proj(_qkvz|_ba)?\.weight$|^lm_head\.weight$")
    quantised, plain = twins(tmp_path, family, "fp8", which, save_original_format=not fused)
    if fused:
        _quantise_experts(quantised, plain)
    torch.testing.assert_close(logits(quantised, family), logits(plain, family), rtol=1e-5, atol=1e-5)


def _quantise_experts(quantised: Path, plain: Path) -> None:
    """[experts, out, in] with a scale for each block of each."""
    stored, values = load_file(quantised / "model.safetensors"), load_file(plain / "model.safetensors")
    names = [name for name in values if ".experts." in name]
    assert names and all(values[name].dim() == 3 for name in names)
    for name in names:
        count, outputs, inputs = values[name].shape
        scales = 0.5 + torch.rand(count, -(-outputs // 16), -(-inputs // 16))
        stored[name] = values[name].to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales
        spread = scales.repeat_interleave(16, 1)[:, :outputs].repeat_interleave(16, 2)[..., :inputs]
        values[name] = stored[name].float() * spread
    save_file(stored, quantised / "model.safetensors")
    save_file(values, plain / "model.safetensors")


def test_shapes_are_told_without_making_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantised, plain = twins(tmp_path, "llama", "w4a16")
    monkeypatch.setattr("foretoken.kernels.stored_tensors.plain", lambda *parts: pytest.fail("numbers were made"))
    tensors, expected = (read_tensors([folder / "model.safetensors"]) for folder in (quantised, plain))
    assert {name: shape_of(tensors, name) for name in tensors} == {name: tuple(tensor.shape) for name, tensor in expected.items()}


def test_a_shorter_last_group_needs_no_g_idx() -> None:
    """As AutoRound stores 24 inputs in groups of 16."""
    nines, eights = torch.full((3, 8), -0x66666667, dtype=torch.int32), torch.full((2, 1), -0x77777778, dtype=torch.int32)
    parts = {"qweight": nines, "qzeros": eights, "scales": torch.tensor([[1.0], [2.0]]).expand(2, 8)}
    assert torch.equal(plain(parts, Quantisation("gptq", 4, group=16)), torch.tensor([1.0] * 16 + [2.0] * 8).expand(8, 24))


def test_scales_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    quantised, _ = twins(tmp_path, "llama", "w8a8")
    stored = load_file(quantised / "model.safetensors")
    stored["model.layers.1.mlp.up_proj.weight_scale"][3] = float("nan")
    save_file(stored, quantised / "model.safetensors")
    with pytest.raises(WeightError, match=r"model.layers.1.mlp.up_proj.weight contains NaN"):
        logits(quantised, "llama")


def test_scales_of_another_shape_are_named(tmp_path: Path) -> None:
    quantised, _ = twins(tmp_path, "llama", "fp8")
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [8, 16]
    (quantised / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightError, match=r"proj.weight cannot be read as config.json says .* do not fit"):
        logits(quantised, "llama")


def _with_state(**changes: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda state: torch.tensor(list(json.dumps(json.loads(bytes(state.tolist())) | changes).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("name", "part", "change", "phrase"),
    [
        ("w4a16-asymmetric", "weight_zero_point", None, "_packed, _scale, _shape and no more"),
        ("w8a8-asymmetric", "weight_zero_point", None, "numbers, _scale and no more"),
        ("nvfp4", "weight_global_scale", None, "_packed, _scale and no more"),
        ("gptq", "qweight", torch.Tensor.float, "words are float32"),
        ("w4a16", "weight_shape", lambda shape: shape - 99, "negative"),
        ("bnb-nf4", "weight.quant_state.bitsandbytes__nf4", _with_state(blocksize=0), "zero"),
        ("bnb-nf4", "weight.quant_state.bitsandbytes__nf4", _with_state(shape=None), "NoneType"),
    ],
)
def test_parts_that_are_missing_or_nonsense_are_no_numbers(tmp_path: Path, name: str, part: str, change: Any, phrase: str) -> None:
    config, encode = FORMATS[name]
    parts = encode(Random(1), 24, 40)[0]
    tensor = parts.pop(part)
    parts |= {part: change(tensor)} if change else {}
    save_file({f"a.{name}": tensor for name, tensor in parts.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    tensors = read_tensors([tmp_path / "model.safetensors"])
    with pytest.raises(WeightError, match=rf"a.weight cannot be read as config.json says that it is quantised: .*{phrase}"):
        assert shape_of(tensors, "a.weight") == (24, 40) and tensors["a.weight"] is None


@pytest.mark.parametrize(
    ("config", "phrase"),
    [
        ({"quant_method": "torchao"}, r"quantised \(torchao\), which is not read: take .* unquantised weights, or a version in FP8"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:fp8_static"}, "auto-round packed as fp8_static"),
        ({"quant_method": "auto-round", "bits": 4, "rotation_config": {"block_size": 32}}, "with a rotation_config"),
        ({"quant_method": "gptq", "bits": 5}, "gptq with 5 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "format marlin"),
        ({"quant_method": "awq", "bits": 4, "format": "gemv"}, "version gemv"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "marlin-24"),
        ({"quant_method": "compressed-tensors", "format": "mxfp6-pack-quantized"}, "mxfp6-pack-quantized"),
        ({"quant_algo": "W4A8_AWQ"}, "modelopt with W4A8_AWQ"),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, "settings that make no sense"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": "4"}}}}, "settings that make no sense"),
    ],
)
def test_what_is_not_read_says_what_to_take(tmp_path: Path, config: dict[str, Any], phrase: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(UnsupportedQuantisation, match=phrase):
        read_quantisation(tmp_path)


def test_where_a_checkpoint_says_how_it_is_stored(tmp_path: Path) -> None:
    for name, (config, _) in FORMATS.items():
        for place in ({"quantization_config": config}, {"text_config": {"quantization_config": config}}):
            (tmp_path / "config.json").write_text(json.dumps(place))
            found = read_quantisation(tmp_path)
            assert found is not None
            assert (found.bits == 8) == name.startswith(("fp8", "w8", "gptq-8", "bnb-int8")), name
    v2 = '{"quantization_config": {"quant_method": "gptq", "bits": 4, "format": "gptq_v2", "group_size": 9}}'
    (tmp_path / "config.json").write_text(v2)
    assert read_quantisation(tmp_path) == Quantisation("gptq", 4, group=9)
    for packing, expected in ROUNDED.items():
        rounded = {"quant_method": "auto-round", "packing_format": packing, "bits": 4}
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": rounded}))
        assert read_quantisation(tmp_path) == expected
    for own, bits in (({"bits": 8}, 8), ({"bits": 16}, 4), ({"group_size": 32}, 4), ({}, 4)):  # of some modules
        for method, setting in (("gptq", "dynamic"), ("auto-round", "extra_config")):
            said = {"quant_method": method, "bits": 4, setting: {"a": {}, "b": own}}
            (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
            assert read_quantisation(tmp_path) == Quantisation("gptq", bits, zeros_less_one=True)
    (tmp_path / "config.json").write_text("{}")
    assert read_quantisation(tmp_path) is None
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    found = read_quantisation(tmp_path)
    assert found is not None and found.method == "modelopt"
