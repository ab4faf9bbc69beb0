"""MTP layers are recognised by their tensors, and what cannot be run is refused with a sentence."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_checkpoints import CONFIGS, GATED, MtpTarget, edit, write
from quantised_checkpoints import quantise
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken.kernels.rope import UnsupportedModel
from foretoken.proposers import mtp
from foretoken.proposers.config import MtpConfig
from foretoken.proposers.config_entry import SpeculativeConfigError
from foretoken.proposers.detection import detect_method
from foretoken.proposers.loading import Resources
from foretoken.proposers.mtp_checkpoint import find_module

FOREIGN = "has the MTP layer of a Qwen3-Next, Qwen3.5 or K-EXAONE, which guesses for these alone, and the target is a 'qwen2'"
Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def renamed(before: str, after: str) -> Change:
    return lambda tensors: {name.replace(before, after): tensor for name, tensor in tensors.items()}


def without(part: str) -> Change:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


@pytest.mark.parametrize("name", [*CONFIGS, *GATED])
def test_what_was_found_is_told(tmp_path: Path, name: str) -> None:
    target = write(name, tmp_path / name)
    first, second = target.load().found
    family = {
        "mimo": "MiMo, 1 module (model.mtp_layers.0.*)",
        "deepseek": "DeepSeek-V3, 1 module (model.layers.2.*)",
        "glm": "GLM-4 MoE, 1 module (model.layers.2.*)",
        "glm_flash": "GLM-4.7-Flash, 1 module (model.layers.2.*)",
        "ernie": "ERNIE-4.5, 1 module (model.mtp_*)",
        "hunyuan": "Hunyuan 3, 1 module (model.layers.2.*)",
        "exaone": "K-EXAONE, 1 module (mtp.*)",
        "nemotron": "Nemotron 3, 1 module (mtp.*)",
        "qwen3_next": "Qwen3-Next, 1 module (mtp.*)",
        "qwen3_5": "Qwen3.5, 1 module (mtp.*)",
        "qwen3_5_moe": "Qwen3.5, 1 module (mtp.*)",
    }[name]
    order = "[state; embedding]" if name == "mimo" else "[embedding; state]"
    assert family in first and order in first and "head: the target's" in second
    assert detect_method(str(target.folder), str(target.folder)) == "mtp"


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        (without("mtp_layers"), "announces 1 MTP layers \\(num_nextn_predict_layers\\), but their tensors are not there"),
        (without("input_proj"), "has no tensor 'model.mtp_layers.0.input_proj.weight'"),
        (without("mtp_layers.0.self_attn.k_proj.weight"), "no tensor 'model.mtp_layers.0.self_attn.k_proj.weight'"),
        (lambda tensors: renamed("model.mtp_layers", "mtp.layers")(renamed("model.mtp_layers.0.input_proj", "mtp.fc")(tensors)), FOREIGN),
        (renamed("model.mtp_layers.0", "model.mtp_block.0"), "as ERNIE-4.5 has them .*known, but not available"),
        (renamed("model.mtp_layers.0", "model.mtp.layers.0"), "as MiMo-V2 or LongCat has them"),
        (renamed("model.mtp_layers.0", "mtp.layers.0"), "known, but not available"),
        (renamed("model.mtp_layers.0", "model.layers.2"), "MTP layers of model type 'qwen2' are not available"),
        (lambda tensors: {n: t[:5] if n.endswith("token_layernorm.weight") else t for n, t in tensors.items()}, "is 5, but 32 is needed"),
        (lambda tensors: {n: t * torch.nan if "mtp" in n else t for n, t in tensors.items()}, "contains NaN"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path: Path, change: Change, phrase: str) -> None:
    target = write("mimo", tmp_path / "mimo")
    edit(target.folder, change)
    with pytest.raises(SpeculativeConfigError, match=phrase):
        find_and_load(target)


def find_and_load(target: MtpTarget) -> None:
    """The target itself is not loaded: what its own loader says of such tensors is tested elsewhere."""
    unreachable: Any = None
    mtp.load(MtpConfig(), Resources(target.view(), unreachable, unreachable, unreachable))


def test_a_target_without_mtp(tmp_path: Path) -> None:
    target = write("mimo", tmp_path / "mimo")
    edit(target.folder, without("mtp_layers"))
    view = replace(target.view(), config={"model_type": "qwen2"})
    with pytest.raises(SpeculativeConfigError, match="has no MTP layers; take another method"):
        find_module(target.folder, view)


def test_gated_modules_that_cannot_be_run(tmp_path: Path) -> None:
    target = write("qwen3_5_moe", tmp_path / "qwen")
    target.hf_config.mtp_use_dedicated_embeddings = True
    with pytest.raises(SpeculativeConfigError, match="has embeddings of its own"):
        target.load()
    del target.hf_config.mtp_use_dedicated_embeddings
    for part, told in (
        ("mtp.layers.0.self_attn.q_proj", "no tensor 'mtp.layers.0.self_attn.q_proj.weight'"),
        ("mtp.layers.0.mlp.experts.down_proj", "no tensor 'mtp.layers.0.mlp.experts.0.down_proj.weight'"),
        ("mtp.norm", "no tensor 'mtp.norm.weight'"),
    ):
        edit(target.folder, without(part))
        with pytest.raises(SpeculativeConfigError, match=told):
            target.load()
        target = write("qwen3_5_moe", tmp_path / "qwen")


def test_the_first_of_several_gated_modules_is_used(tmp_path: Path) -> None:
    target = write("qwen3_5", tmp_path / "qwen")
    edit(target.folder, lambda tensors: {**tensors, "mtp.layers.1.mlp.up_proj.weight": torch.zeros(2), "mtp.other": torch.zeros(2)})
    told = target.load().found
    assert "2 modules, of which the first" in told[0] and told[2:] == ("unused tensors: mtp.other",)


@pytest.mark.parametrize("name", ["mimo", "deepseek", "qwen3_next"])
def test_a_quantised_layer_guesses_as_the_same_numbers_in_plain(tmp_path: Path, name: str) -> None:
    target = write(name, tmp_path / name)
    plain = quantise(target.folder, "fp8", re.compile(r"(mtp|layers\.2\.).*(proj|mqa)\.weight$"))

    def guess() -> list[float]:
        engine = target.begun(prompt=[5, 3, 1, 8], num_speculative_tokens=2)
        return engine.step(lambda *_: ((), 7))["a"].confidence

    assert target.load().found[2:] == ()
    quantised = guess()
    edit(target.folder, lambda _: dict(plain), quantization_config=None)
    assert quantised and guess() == quantised


@pytest.mark.parametrize(
    "name, part",
    [
        ("ernie", "mtp_emb_norm.0"),
        ("ernie", "mtp_block.0.mlp.up_proj"),
        ("hunyuan", "layers.2.final_layernorm"),
        ("deepseek", "layers.2.mlp.experts.3.up_proj"),
        ("deepseek", "layers.2.self_attn.q_b_proj"),
        ("deepseek", "layers.2.self_attn.kv_b_proj"),
    ],
)
def test_missing_tensors_are_called_as_they_are_published(tmp_path: Path, name: str, part: str) -> None:
    target = write(name, tmp_path / name)
    edit(target.folder, without(f"model.{part}"))
    with pytest.raises(SpeculativeConfigError, match=f"no tensor 'model.{part}.weight'"):
        target.load()


def test_unused_tensors_are_told_and_copies_are_not(tmp_path: Path) -> None:
    target = write("glm", tmp_path / "glm")
    edit(target.folder, lambda tensors: {**tensors, "model.layers.2.extra.weight": torch.zeros(2)})
    assert target.load().found[2:] == ("unused tensors: model.layers.2.extra.weight",)


@pytest.mark.parametrize("has_config", [True, False])
@pytest.mark.parametrize("version", ["0.9.0", None])
def test_a_folder_of_its_own(tmp_path: Path, has_config: bool, version: str | None) -> None:
    """The layout of `speculators`: the layer alone, its config nested; without one it is as the target's.

    Folders that name its version read the embedding's half of the pair first, all others the state's.
    """
    target = write("mimo", tmp_path / "mimo")
    layers = target.hf_config.to_dict()
    config: dict[str, Any] = {"speculators_model_type": "mtp", **({"transformer_layer_config": layers} if has_config else {})}
    own = moved(target, tmp_path / "own", {"model.mtp_layers.": "mtp_layers."}, config)
    if version is not None:
        part = "mtp_layers.0.input_proj.weight"
        edit(own, lambda tensors: {**tensors, part: tensors[part].roll(layers["hidden_size"], 1)}, speculators_version=version)
    assert "speculators, 1 module (mtp_layers.0.*)" in target.load(model=str(own)).found[0]
    assert_guesses_as_the_layer_does(target, own)
    edit(own, dict, transformer_layer_config={**layers, "hidden_size": 64})
    with pytest.raises(SpeculativeConfigError, match="trained for a target of hidden size 64, this one has 32"):
        target.load(model=str(own))


SPECULATORS_NAMES = {
    "mtp.fc.": "mtp_layers.0.input_proj.",
    "mtp.pre_fc_norm_hidden.": "mtp_layers.0.hidden_layernorm.",
    "mtp.pre_fc_norm_embedding.": "mtp_layers.0.token_layernorm.",
    "mtp.norm.": "mtp_layers.0.final_layernorm.",
    "mtp.layers.0.": "mtp_layers.0.",
}
FIRST_NAMES = {"mtp.layers.0.": "mtp_layers.0.", "mtp.": "mtp_layers.0."}


def moved(target: MtpTarget, own: Path, names: dict[str, str], config: dict[str, Any]) -> Path:
    """The target's layer in a folder of its own; names: what its tensors' begin with, before and after."""
    own.mkdir()
    layer: dict[str, Tensor] = {}
    for name, tensor in load_file(target.folder / "model.safetensors").items():
        before = next((before for before in names if name.startswith(before)), None)
        if before is not None:
            layer[names[before] + name.removeprefix(before)] = tensor.clone()
    save_file(layer, own / "model.safetensors")
    (own / "config.json").write_text(json.dumps(config))
    edit(target.folder, lambda tensors: {n: t for n, t in tensors.items() if not n.startswith(tuple(names))})
    return own


def assert_guesses_as_the_layer_does(target: MtpTarget, own: Path) -> None:
    assert detect_method(str(own), str(target.folder)) == "mtp"
    assert target.load(model=str(own)).found[2:] == ()
    engine = target.run(model=str(own), num_speculative_tokens=2)
    engine.add("a", [5, 7, 9])
    engine.step(lambda request, guess: ((), 3))
    guess = engine.step(lambda request, guess: ((), 3))["a"]
    assert guess.confidence == pytest.approx(target.probs(guess).max(-1).values.tolist(), abs=1e-4)


def test_a_gated_layer_of_speculators_beside_another_target(tmp_path: Path) -> None:
    target = write("qwen3_5", tmp_path / "qwen")
    layers = target.hf_config.to_dict()
    own = moved(target, tmp_path / "own", SPECULATORS_NAMES, {"transformer_layer_config": layers})
    with pytest.raises(SpeculativeConfigError, match=FOREIGN):
        find_module(own, replace(target.view(), config={**layers, "model_type": "qwen2"}))
    (own / "config.json").write_text("{}")
    assert_guesses_as_the_layer_does(target, own)  # its kind is the target's where it says nothing


@pytest.mark.parametrize("names", [SPECULATORS_NAMES, FIRST_NAMES, {"mtp.": "mtp."}], ids=["speculators", "its first files", "Qwen's"])
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_a_gated_layer_in_a_folder_of_its_own(tmp_path: Path, name: str, names: dict[str, str]) -> None:
    target = write(name, tmp_path / name)
    config: dict[str, Any] = {"speculators_model_type": "mtp", "transformer_layer_config": target.hf_config.to_dict()}
    assert_guesses_as_the_layer_does(target, moved(target, tmp_path / "own", names, {} if "mtp." in names.values() else config))


def test_a_state_space_that_guesses_is_refused(tmp_path: Path) -> None:
    target = write("nemotron", tmp_path / "nemotron")
    target.hf_config.mtp_layers_block_type = ["linear_attention", "moe"]
    with pytest.raises(UnsupportedModel, match="MTP layer with a state space"):
        target.load()


@pytest.mark.parametrize("name", ["deepseek", "glm", "glm_flash", "hunyuan"])
def test_a_numbered_layer_exported_alone(tmp_path: Path, name: str) -> None:
    """SGLang's NextN folders number it anew."""
    target = write(name, tmp_path / name)
    config = {**target.hf_config.to_dict(), "num_hidden_layers": 1, "architectures": ["DeepseekV3ForCausalLMNextN"]}
    assert_guesses_as_the_layer_does(target, moved(target, tmp_path / "own", {"model.layers.2.": "model.layers.0."}, config))
