"""Checkpoints that can see as well are served as the text models that they contain, whatever their tensors are called."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from decoding import Decoding
from quantised_checkpoints import quantise
from safetensors.torch import load_file, save_file
from tiny_models import SIZES, save_tokenizer, tiny_config
from variants import slow_but

from foretoken.engine.config import ModelConfig
from foretoken.engine.errors import ModelLoadError
from foretoken.engine.model import LoadedModel, load_model
from foretoken.engine.target_view import target_view
from foretoken.kernels.decoder import COMPOSITES, OTHER_NAMES
from foretoken.proposers.detection import method_of

PROMPT = torch.randint(0, SIZES["vocab_size"], (30,), generator=torch.Generator().manual_seed(1)).tolist()
QWEN_EYE = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16,
    "patch_size": 4, "temporal_patch_size": 1,
}
EYE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
}
SIGLIP, CLIP = {**EYE, "model_type": "siglip_vision_model"}, {**EYE, "model_type": "clip_vision_model"}
WHOLES: dict[str, tuple[str, str, dict[str, Any]]] = {  # class -> text family, what it sees with
    "qwen3_5": ("Qwen3_5", "qwen3_5", QWEN_EYE),
    "qwen3_5_moe": ("Qwen3_5Moe", "qwen3_5_moe", QWEN_EYE),
    "gemma3": ("Gemma3", "gemma3", SIGLIP),
    "mistral3": ("Mistral3", "ministral3", {**EYE, "model_type": "pixtral", "head_dim": 16}),
    "llava": ("Llava", "llama", CLIP),
    "llava_next": ("LlavaNext", "mistral", CLIP),
    "internvl": ("InternVL", "qwen2", {**EYE, "image_size": [28, 28], "patch_size": [14, 14], "model_type": "internvl_vision"}),
    "qwen2_vl": ("Qwen2VL", "qwen2", {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 32, "patch_size": 4}),
    "qwen2_5_vl": ("Qwen2_5_VL", "qwen2", QWEN_EYE),
    "qwen3_vl": ("Qwen3VL", "qwen3", {**QWEN_EYE, "deepstack_visual_indexes": [0]}),
    "glm4v": ("Glm4v", "glm4", {**QWEN_EYE, "image_size": 28}),
    "glm46v": ("Glm46V", "glm4", {**QWEN_EYE, "image_size": 28, "model_type": "glm4v_vision"}),
    "lfm2_vl": ("Lfm2Vl", "lfm2", {**EYE, "model_type": "siglip2_vision_model"}),
    "gemma4": ("Gemma4", "gemma4", {**EYE, "model_type": "gemma4_vision", "head_dim": 16}),
    "llava_onevision": ("LlavaOnevision", "qwen2", SIGLIP),
    "idefics3": ("Idefics3", "llama", EYE),
    "smolvlm": ("SmolVLM", "llama", EYE),
    "glm4v_moe": ("Glm4vMoe", "glm4_moe", {**QWEN_EYE, "image_size": 28}),
    "gemma4_unified": ("Gemma4Unified", "gemma4_unified", {"patch_size": 2, "mm_embed_dim": 32, "mm_posemb_size": 8}),
    "muse_glimmer": ("MuseGlimmer", "muse_glimmer", {**EYE, "merge_size": 2, "pos_emb_height": 4, "pos_emb_width": 4}),
}

ROPE = {"rope_theta": 100.0, "rope_type": "default"}
TEXTS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}},
    "qwen2_5_vl": {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}},
    "qwen3_vl": {"rope_parameters": {**ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}},
    "glm4v": {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}, "head_dim": 8},
}
TEXTS["gemma4"] = {
    "num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "full_attention"], "num_kv_shared_layers": 1,
}
TEXTS["glm46v"] = TEXTS["glm4v"]
TEXTS["glm4v_moe"] = {**TEXTS["glm4v"], "use_qk_norm": False}


def write(name: str, folder: Path, **settings: Any) -> Any:
    """A random whole in a folder, as its class saves it, with a tokenizer; returns the model."""
    prefix, family, eye = WHOLES[name]
    if not hasattr(transformers, f"{prefix}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {prefix}")
    own = TEXTS.get(name, {})
    text = tiny_config(family, vocab_size=300, tie_word_embeddings=settings.get("tie_word_embeddings", False), **own).to_dict()
    if name == "glm46v":
        text["model_type"] = "glm4v_text"
    config_class, model_class = getattr(transformers, f"{prefix}Config"), getattr(transformers, f"{prefix}ForConditionalGeneration")
    config = config_class(text_config=text, vision_config=dict(eye), **{"tie_word_embeddings": False, **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config).eval()
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            parameter.data = 1 + 0.3 * noise if "norm" in key else noise * (0.5 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def rewrite(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    save_file({name: tensor.clone() for name, tensor in change(load_file(file)).items()}, file, {"format": "pt"})


def load(folder: Path, **settings: Any) -> LoadedModel:
    return load_model(ModelConfig(str(folder), dtype="float32", **{"executor": "torch", **settings}), lambda line: None)


@torch.no_grad()
def check(model: Any, loaded: LoadedModel) -> None:
    expected = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    logits = Decoding(loaded.executor).feed([PROMPT]).logits
    assert logits is not None and (logits - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_every_kind_is_tested() -> None:
    assert tuple(WHOLES) == COMPOSITES


@pytest.mark.parametrize("name", WHOLES)
def test_the_text_half_says_what_the_whole_says(tmp_path: Path, name: str) -> None:
    model = write(name, tmp_path, eos_token_id=[7, 8])
    loaded = load(tmp_path)
    check(model, loaded)
    assert loaded.plan.program is not None and loaded.vocab_size == 300 and loaded.eos_token_ids >= {7, 8}
    assert loaded.hf_config is loaded.hf_config.get_text_config() and "3 layers" in loaded.describe()
    view = target_view(loaded)
    kind = model.config.text_config.model_type
    assert (view.num_layers, view.hidden_size, view.config["model_type"]) == (3, 32, OTHER_NAMES.get(kind, kind))
    assert method_of(tmp_path) == (None if name == "lfm2_vl" else "draft_model")


@pytest.mark.parametrize("name", slow_but(["qwen3_5", "gemma3", "mistral3", "llava", "qwen2_vl"], WHOLES))
@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_newer_and_older_names(tmp_path: Path, name: str, prefix: str) -> None:
    """Older saves have the head inside of the language model, and nothing in front of what sees."""
    model = write(name, tmp_path)

    def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        old = next(key for key in tensors if key.endswith("embed_tokens.weight")).removesuffix("embed_tokens.weight")
        found = {key.replace(old, prefix) if key.startswith(old) else key: tensor for key, tensor in tensors.items()}
        head = next(key for key in found if "lm_head" in key)
        found["lm_head.weight" if prefix.startswith("model") else "language_model.lm_head.weight"] = found.pop(head)
        return found

    rewrite(tmp_path, renamed)
    check(model, load(tmp_path))


@pytest.mark.parametrize("name", ["qwen3_5", "gemma3"])
def test_a_head_that_is_the_embedding(tmp_path: Path, name: str) -> None:
    """The whole says so: its text_config may say anything."""
    model = write(name, tmp_path, tie_word_embeddings=True)
    config = tmp_path / "config.json"
    raw = json.loads(config.read_text())
    config.write_text(json.dumps({**raw, "text_config": {**raw["text_config"], "tie_word_embeddings": False}}))
    loaded = load(tmp_path)
    check(model, loaded)
    assert target_view(loaded).head == target_view(loaded).embedding == "model.embed_tokens.weight"


def test_a_quantised_text_half(tmp_path: Path) -> None:
    model = write("qwen3_5_moe", tmp_path)
    plain = quantise(tmp_path, "fp8", re.compile(r"language_model\.layers\..*proj(_qkv|_z)?\.weight$"))
    model.save_pretrained(tmp_path / "twin")
    save_file(dict(plain), tmp_path / "twin" / "model.safetensors", {"format": "pt"})
    check(type(model).from_pretrained(tmp_path / "twin").eval(), load(tmp_path))


def test_nothing_of_the_other_half_is_read(tmp_path: Path) -> None:
    model = write("qwen3_5", tmp_path)
    rewrite(tmp_path, lambda tensors: {key: tensor * torch.nan if "visual" in key else tensor for key, tensor in tensors.items()})
    check(model, load(tmp_path))


def test_experts_in_two_tensors_as_they_are_published(tmp_path: Path) -> None:
    model = write("qwen3_5_moe", tmp_path)
    model.save_pretrained(tmp_path, save_original_format=False)
    assert "model.language_model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / "model.safetensors")
    check(model, load(tmp_path))


def test_missing_tensors_have_the_names_of_the_text_model(tmp_path: Path) -> None:
    write("qwen3_5", tmp_path)
    rewrite(tmp_path, lambda tensors: {key: tensor for key, tensor in tensors.items() if "layers.1.self_attn.q_proj" not in key})
    with pytest.raises(ModelLoadError, match="missing: model.layers.1.self_attn.q_proj.weight$"):
        load(tmp_path)


def test_draft_layers_of_the_whole_are_left_to_others(tmp_path: Path) -> None:
    model = write("qwen3_5", tmp_path)
    rewrite(tmp_path, lambda tensors: {**tensors, "mtp.fc.weight": torch.zeros(32, 64)})
    check(model, load(tmp_path))


def test_transformers_cannot_run_recurrent_layers(tmp_path: Path) -> None:
    write("qwen3_5", tmp_path)
    with pytest.raises(ModelLoadError, match="through transformers: it has layers of type 'linear_attention'.*use executor auto"):
        load(tmp_path, executor="transformers")


def test_transformers_runs_the_whole(tmp_path: Path) -> None:
    loaded = load(write_gemma(tmp_path), executor="transformers")
    assert loaded.plan.kind == "transformers" and loaded.hf_config.model_type == "gemma3"


def write_gemma(folder: Path) -> Path:
    write("gemma3", folder)
    return folder


def test_wholes_with_another_head_are_refused(tmp_path: Path) -> None:
    write("qwen3_5", tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": ["Qwen3_5ForSequenceClassification"]}))
    with pytest.raises(ModelLoadError, match="does not continue text"):
        load(tmp_path)
