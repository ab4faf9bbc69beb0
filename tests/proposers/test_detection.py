"""The method of a model folder, found in tensors of the published layouts and in config.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from foretoken.proposers.config import EagleConfig, MtpConfig
from foretoken.proposers.config_entry import SpeculativeConfigError
from foretoken.proposers.config_reading import parse_speculative_config
from foretoken.proposers.detection import detect_method, is_same_model

H = 4
Shapes = Mapping[str, tuple[int, ...]]


def folder_of(path: Path, config: object, shapes: Shapes) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    if shapes:
        save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, path / "model.safetensors")
    return path


def decoder(prefix: str, norm: bool = True) -> dict[str, tuple[int, ...]]:
    names = {f"{prefix}self_attn.{p}_proj.weight": (H, H) for p in "qkvo"} | {f"{prefix}mlp.up_proj.weight": (8, H)}
    return names | {f"{prefix}post_attention_layernorm.weight": (H,)} | ({f"{prefix}input_layernorm.weight": (H,)} if norm else {})


def eagle3_layer(prefix: str, mla: bool = False) -> dict[str, tuple[int, ...]]:
    queries = {"q_a_proj": (2, 2 * H)} if mla else {f"{p}_proj": (H, 2 * H) for p in "qkv"}
    return {f"{prefix}hidden_norm.weight": (H,), f"{prefix}input_layernorm.weight": (H,)} | {
        f"{prefix}self_attn.{name}.weight": shape for name, shape in queries.items()
    }


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
MODEL = {"model.embed_tokens.weight": (9, H), "lm_head.weight": (9, H), "model.norm.weight": (H,), **decoder("model.layers.0.")}
EAGLE = {"fc.weight": (H, 2 * H), "embed_tokens.weight": (9, H), **decoder("layers.0.", norm=False)}
EAGLE3 = {"fc.weight": (H, 3 * H), "norm.weight": (H,), "d2t": (9,), **eagle3_layer("midlayer.")}
DFLASH = {"fc.weight": (H, 5 * H), "hidden_norm.weight": (H,), "norm.weight": (H,), **decoder("layers.0.")}
MARKOV = {"markov_head.markov_w1.weight": (9, 2), "markov_head.markov_w2.weight": (9, 2)}
MEDUSA = {f"{h}.0.linear.weight": (H, H) for h in range(5)} | {f"{h}.1.weight": (9, H) for h in range(5)}
MTP = {"mtp.fc.weight": (H, 2 * H), **decoder("mtp.layers.0.")}
MLP = {"speculator.emb.0.weight": (9, H), "speculator.proj.0.weight": (H, H)}

BY_TENSORS: dict[str, tuple[dict[str, Any], Shapes, str]] = {
    "causal lm": (LLAMA, MODEL, "draft_model"),
    "nothing": ({}, {}, "draft_model"),
    "eagle": (LLAMA, EAGLE, "eagle"),
    "eagle, converted": (LLAMA, {f"model.{name}": shape for name, shape in EAGLE.items()}, "eagle"),
    "eagle with a bias": (LLAMA, {**EAGLE, "fc.bias": (H,)}, "eagle"),
    "eagle3": (LLAMA, EAGLE3, "eagle3"),
    "eagle3, two taps": (LLAMA, {**EAGLE3, "fc.weight": (H, 2 * H)}, "eagle3"),
    "eagle3 without fc": (LLAMA, eagle3_layer("midlayer."), "eagle3"),
    "eagle3, many layers": (LLAMA, {**eagle3_layer("midlayer.0."), **decoder("midlayer.1.")}, "eagle3"),
    "eagle3, latent attention": ({}, eagle3_layer("layers.0.", mla=True), "eagle3"),
    "p-eagle": ({**LLAMA, "pard_token": 3}, {**EAGLE3, "mask_hidden": (1, 1, 3 * H)}, "eagle3"),
    "dflash": ({"model_type": "qwen3"}, DFLASH, "dflash"),
    "dspark": ({"model_type": "qwen3"}, {**DFLASH, **MARKOV}, "dspark"),
    "medusa": ({"medusa_num_heads": 2}, MEDUSA, "medusa"),
    "medusa without a config": ({}, MEDUSA, "medusa"),
    "medusa 2": (LLAMA, {**MODEL, **{f"medusa_head.{name}": shape for name, shape in MEDUSA.items()}}, "medusa"),
    "medusa, vllm": ({}, {"blocks.0.layers.0.weight": (H, H), "lm_heads.0.weight": (9, H)}, "medusa"),
    "hydra": ({}, {"hydra_mlp.0.1.linear.weight": (H, 2 * H)}, "hydra"),
    "hydra, of another kind": ({"hydra_head_arch": "eagle-attn"}, EAGLE, "hydra"),
    "mlp speculator": ({}, MLP, "mlp_speculator"),
    "n-gram cache": ({"model_type": "ngram_cache"}, {"runs.1": (9, 1), "next.1": (9,), "chance.1": (9,)}, "ngram_cache"),
    "pard": ({**LLAMA, "pard_token": 3}, MODEL, "pard"),
    "pard, vllm": ({**LLAMA, "ptd_token_id": 3}, MODEL, "pard"),
    "mtp alone": ({}, MTP, "mtp"),
    "mtp alone, speculators": ({}, {"mtp_layers.0.input_proj.weight": (H, 2 * H), **decoder("mtp_layers.0.")}, "mtp"),
    "mtp alone, numbered anew": (LLAMA, {**MODEL, "model.layers.0.eh_proj.weight": (H, 2 * H)}, "mtp"),
    "mtp of a whole model": (LLAMA, {**MODEL, **MTP}, "draft_model"),
}

BY_CONFIG: list[tuple[dict[str, Any], str]] = [
    ({"speculators_model_type": "eagle"}, "eagle"),
    ({"speculators_model_type": "eagle3"}, "eagle3"),
    ({"speculators_model_type": "peagle"}, "eagle3"),
    ({"speculators_model_type": "domino"}, "dflash"),
    ({"speculators_model_type": "dspark"}, "dspark"),
    ({"speculators_model_type": "mtp"}, "mtp"),
    ({"model_type": "deepseek_mtp"}, "mtp"),
    ({"model_type": "gemma4_assistant"}, "mtp"),
    ({"model_type": "muse_glimmer_assistant"}, "dflash"),
    ({"architectures": ["Qwen3Model"], "markov_rank": 0}, "dspark"),
    ({"architectures": ["DFlashDraftModel"]}, "dflash"),
    ({"architectures": ["DFlashDraftModel"], "dflash_config": {"markov_rank": 8}}, "dspark"),
    ({"architectures": ["DFlashDraftModel"], "dspark_config": {}}, "dspark"),
    ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}, "eagle3"),
    ({"model_type": "qwen3", "dflash_config": {}}, "dflash"),
    ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
    ({"architectures": ["LlamaForCausalLM"], "eagle_config": {}}, "eagle3"),
    ({"architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
    ({"model_type": "eagle", "architectures": None}, "eagle"),
    ({"model_type": "medusa"}, "medusa"),
    ({"medusa_num_heads": 2}, "medusa"),
    ({"architectures": ["MLPSpeculatorPreTrainedModel"]}, "mlp_speculator"),
    ({"architectures": ["ArcticLSTMSpeculatorPreTrainedModel"]}, "mlp_speculator"),
    ({"architectures": ["MLPVariantSpeculatorPreTrainedModel"]}, "mlp_speculator"),
    ({"architectures": ["Qwen3ForCausalLM"], "pard_token": 1}, "pard"),
]


@pytest.mark.parametrize("layout", BY_TENSORS)
def test_by_tensors(tmp_path: Path, layout: str) -> None:
    config, shapes, method = BY_TENSORS[layout]
    assert detect_method(str(folder_of(tmp_path / "m", config, shapes))) == method


@pytest.mark.parametrize(("config", "method"), BY_CONFIG)
def test_by_config_where_weights_are_pickles(tmp_path: Path, config: dict[str, Any], method: str) -> None:
    folder = folder_of(tmp_path / "m", config, {})
    (folder / "pytorch_model.bin").write_bytes(b"never opened")
    assert detect_method(str(folder)) == method


@pytest.mark.parametrize(("file", "method"), [("medusa_lm_head.pt", "medusa"), ("hydra_lm_head.pt", "hydra"), ("warp_model.bin", "pard")])
def test_by_names_of_files(tmp_path: Path, file: str, method: str) -> None:
    folder = folder_of(tmp_path / "m", LLAMA, {})
    (folder / file).touch()
    assert detect_method(str(folder)) == method


def test_pickles_that_call_themselves_a_whole_model_are_judged_by_their_folders_name(tmp_path: Path) -> None:
    for name, method in (("EAGLE-LLaMA3-Instruct-8B", "eagle"), ("Llama-3.2-1B", "draft_model")):
        folder = folder_of(tmp_path / name, LLAMA, {})
        (folder / "pytorch_model.bin").touch()
        assert detect_method(str(folder)) == method


def test_tensors_tell_more_than_names(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "medusa-eagle-", {"architectures": ["EagleLlamaForCausalLM"]}, EAGLE3)
    assert detect_method(str(folder)) == "eagle3"
    (proposer,) = parse_speculative_config({"model": str(folder)}).proposers
    assert proposer == EagleConfig(str(folder), "eagle3")


@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("yuhuili/EAGLE-llama2-chat-7B", "eagle"),
        ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "eagle3"),
        ("RedHatAI/Qwen3-8B-speculator.eagle3", "eagle3"),
        ("amazon/gpt-oss-20b-p-eagle-long-context", "eagle3"),
        ("z-lab/Qwen3-4B-DFlash-b16", "dflash"),
        ("UIUC-SSAIL/Qwen3-8B-XPress-b16", "dflash"),
        ("meta-models/Muse-Glimmer-30B-assistant", "dflash"),
        ("meta-models/Muse-Glimmer-30B", "draft_model"),
        ("RedHatAI/Qwen3-8B-speculator.domino", "dflash"),
        ("me/train-express-0.6B", "draft_model"),
        ("deepseek-ai/dspark_gemma4_12b_block7", "dspark"),
        ("LiquidAI/LFM2.5-1.2B-Instruct-DSpark", "dspark"),
        ("deepseek-ai/dflash_qwen3_4b_block7", "dspark"),
        ("FasterDecoding/medusa-vicuna-7b-v1.3", "medusa"),
        ("ankner/hydra-vicuna-33b-v1.3", "hydra"),
        ("ibm-ai-platform/llama3-8b-accelerator", "mlp_speculator"),
        ("Snowflake/Arctic-LSTM-Speculator-Llama-3.1-8B-Instruct", "mlp_speculator"),
        ("amd/PARD-Qwen3-0.6B", "pard"),
        ("google/gemma-4-E4B-it-assistant", "mtp"),
        ("amd/PARD2-Qwen3-8B", "pard"),
        ("Qwen/Qwen3-0.6B", "draft_model"),
        ("[ngram]", "ngram"),
    ],
)
def test_a_hub_id_is_judged_by_its_name(model: str, method: str) -> None:
    assert detect_method(model) == method


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"num_hidden_layers": 1}, ["model.layers.1.eh_proj.weight"]),
        ({"text_config": {"num_hidden_layers": 1}}, ["model.language_model.layers.1.eh_proj.weight"]),
        ({"num_hidden_layers": 1}, ["model.mtp_layers.0.input_proj.weight"]),
        ({"num_hidden_layers": 1}, ["mtp.fc.weight"]),
        ({"num_hidden_layers": 1}, ["model.mtp.layers.0.eh_proj.weight"]),
        ({"num_hidden_layers": 1}, ["model.mtp_block.0.mlp.up_proj.weight"]),
    ],
)
def test_draft_layers_count_in_the_target_only(tmp_path: Path, config: dict[str, Any], names: list[str]) -> None:
    target = folder_of(tmp_path / "t", config, {**MODEL, **dict.fromkeys(names, (H, 2 * H))})
    assert detect_method(str(target)) == detect_method(str(target), str(tmp_path)) == "draft_model"
    assert detect_method(str(target), str(target)) == "mtp"
    (tmp_path / "link").symlink_to(target)
    assert parse_speculative_config({"model": str(tmp_path / "link")}, str(target)).proposers == (MtpConfig(),)


def test_a_target_without_draft_layers_drafts_for_itself(tmp_path: Path) -> None:
    target = folder_of(tmp_path / "t", LLAMA, MODEL)
    assert detect_method(str(target), str(target)) == "draft_model"


def test_same_model(tmp_path: Path) -> None:
    assert is_same_model("org/a", "org/a") and not is_same_model("org/a", "org/b") and not is_same_model("org/a", None)
    assert is_same_model(str(tmp_path), f"{tmp_path}/../{tmp_path.name}")


@pytest.mark.parametrize("text", [b"{", b"\xff\xfe", b"[]"])
def test_a_damaged_config_says_where(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(SpeculativeConfigError, match=r"config\.json"):
        parse_speculative_config({"model": str(tmp_path)})


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n", (9).to_bytes(8, "little") + b"{not json"])
def test_a_damaged_checkpoint_says_where(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(SpeculativeConfigError, match=r"model\.safetensors is no whole safetensors file"):
        detect_method(str(tmp_path))
