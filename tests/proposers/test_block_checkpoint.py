"""What is said of block drafters that cannot be read, or not beside this target, and of those that can."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from block_checkpoints import PUBLISHED, Drafter, Published
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken.proposers.config_entry import SpeculativeConfigError

Change = Callable[[dict[str, Tensor]], object]


def write(folder: Path, name: str, change: Change | None = None, **config: Any) -> Drafter:
    """The drafter with other tensors and settings; a setting of None is left out."""
    published: Published = PUBLISHED[name]
    settings = {key: value for key, value in {**published.config, **config}.items() if value is not None}
    drafter = Drafter.write(replace(published, config=settings), folder)
    if change is not None:
        tensors = load_file(drafter.folder / "model.safetensors")
        change(tensors)
        save_file(tensors, drafter.folder / "model.safetensors")
    return drafter


def put(name: str, *shape: int) -> Change:
    return lambda tensors: tensors.__setitem__(name, torch.zeros(shape))


def drop_all(part: str) -> Change:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if part in name]


def drop(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def lattice(**settings: Any) -> dict[str, Any]:
    """The settings of "lilicorr" with some others, None = left out."""
    named = {key if key == "target_layer_ids" else f"lilicorr_{key}": value for key, value in settings.items()}
    inner = PUBLISHED["lilicorr"].config["dflash_config"] | named
    return {"dflash_config": {key: value for key, value in inner.items() if value is not None}}


def own_vocabulary(tensors: dict[str, Tensor]) -> None:
    tensors |= {"lm_head.weight": torch.ones(40, 32), "d2t": torch.zeros(40, dtype=torch.int64)}


@pytest.mark.parametrize(
    "name, change, config, words",
    [
        ("z-lab", put("layers.0.attention_conv.base_kernel", 2, 2, 32), {}, "no tensor 'layers.0.attention_conv.kernel_projection.weight'"),
        ("z-lab", put("candidate_selector.predecessor_codebook", 60, 4), {}, "no tensor 'candidate_selector.hidden_projection.weight'"),
        ("dflash2", put("candidate_selector.successor_codebook", 59, 8), {}, "60 x 8 is needed"),
        ("dflash2", drop("candidate_selector.predecessor_codebook"), {}, "no tensor 'candidate_selector.predecessor_codebook'"),
        ("dflash2", drop("layers.1.mlp_conv.base_kernel"), {}, "no tensor 'layers.1.mlp_conv.base_kernel'"),
        ("dflash2", put("layers.0.attention_conv.base_kernel", 2, 32), {}, "kernels \\[2, taps, 32\\]"),
        ("dflash2", put("layers.0.attention_conv.base_kernel", 2, 0, 32), {}, "kernels \\[2, taps, 32\\]"),
        ("dflash2", put("layers.0.attention_conv.kernel_projection.weight"), {}, "kernels \\[2, taps, 32\\]"),
        ("dflash2", put("layers.0.attention_conv.kernel_projection.weight", 20, 32), {}, "groups that divide the width"),
        ("dflash2", drop_all("candidate_selector."), {}, "no tensor 'candidate_selector.hidden_projection.weight'"),
        ("dflash2, speculators", None, {"selector_top_k": 10**30}, "from 1 to 1024"),
        ("dflash2, three taps", None, {"output_multiplier": float("nan")}, "'output_multiplier' must be a number below a million, not nan"),
        ("z-lab", None, {"dflash_config": {"mask_token_id": 59, "attention_sink_bias": "no"}}, "must be true or false, not 'no'"),
        ("z-lab", None, {"layer_types": [1, 2]}, "'layer_types' must name 2 layers"),
        ("dflash2, speculators", None, {"selector_top_k": None}, "'selector_top_k' must be an integer from 1 to 1024, not None"),
        ("z-lab", put("lilicorr.same_slot_bias", 4), {}, "'lilicorr_candidate_topk' must be an integer from 1 to 64, not None"),
        ("z-lab", None, {"architectures": ["LiLiCorrDraftModel"]}, "'lilicorr_candidate_topk' must be an integer"),
        ("lilicorr", None, lattice(hidden_size=None), "'lilicorr_hidden_size' must be an integer from 0 to 65536, not None"),
        ("lilicorr", None, lattice(num_layers=True), "'lilicorr_num_layers' must be an integer from 1 to 64, not True"),
        ("lilicorr", None, lattice(logit_scale=0), "'lilicorr_logit_scale' must be a positive number, not 0"),
        ("lilicorr", None, lattice(vector_eps=float("inf")), "'lilicorr_vector_eps' must be a number below a million, not inf"),
        ("lilicorr", None, lattice(num_heads=5), "5 heads of width 32"),
        ("lilicorr", None, lattice(candidate_topk=61), "61 candidates out of 60 tokens"),
        ("lilicorr", None, lattice(enabled=False), "norms that no known drafter of its kind has"),
        ("lilicorr", None, lattice(num_layers=1), "norms that no known drafter of its kind has"),
        ("lilicorr", None, lattice(num_layers=3), "no tensor 'lilicorr.layers.2.attn_norm.weight'"),
        ("lilicorr", None, lattice(hidden_size=24), "no tensor 'lilicorr.token_proj.weight'"),
        ("lilicorr", None, lattice(mlp_ratio=2), "is 48 x 32, but 64 x 32 is needed"),
        ("lilicorr", None, {"block_size": 5}, "'lilicorr.relative_slot_bias' in .* is 4 x 11, but 4 x 9 is needed"),
        ("lilicorr", drop("lilicorr.layers.1.attn.in_proj_bias"), {}, "no tensor 'lilicorr.layers.1.attn.in_proj_bias'"),
        ("lilicorr", put("lilicorr.rank_embedding", 1, 1, 1, 8, 32), {}, "1 x 1 x 1 x 4 x 32 is needed"),
        ("lilicorr", own_vocabulary, {}, "LiLiCorr with a vocabulary of its own"),
        ("lilicorr", None, {"sample_from_anchor": True}, "guesses in the last known token's place"),
        ("z-lab, wide", None, lattice(target_layer_ids=[0, 7, 2, 4]), "reads embeddings of width 48, the target's are 32 wide"),
        ("z-lab", None, {"dflash_config": {"mask_token_id": 59, "projector_type": "lattice"}}, "is a lattice drafter"),
        ("z-lab", None, {"architectures": ["DominoDraftModel"]}, "no tensor 'prefix_gru.weight_hh_l0'"),
        ("domino", drop("prefix_gru.weight_ih_l0"), {}, "no tensor 'prefix_gru.weight_ih_l0'"),
        ("domino", put("prefix_gru.weight_hh_l0", 35, 12), {}, "36 x 12 is needed"),
        ("domino", put("prefix_gru.weight_ih_l0", 36, 31), {}, "36 x 32 is needed"),
        ("domino", put("embed_proj.0.weight", 10, 43), {}, "any x 44 is needed"),
        ("domino", put("embed_proj.2.weight", 59, 10), {}, "60 x 10 is needed"),
        ("domino", put("prefix_gru.bias_ih_l0", 36), {}, "one layer without biases"),
        ("domino", put("layer_fusion_weights", 2, 3), {}, "Domino with fused layers"),
        ("domino", put("hidden_proj.0.weight", 2, 3), {}, "Domino with projected states"),
        ("z-lab", None, {"dflash_config": {"mask_token_id": 59, "fusion_mode": "flare"}}, "DFlash with fused layers"),
        ("z-lab", put("layer_fusion_weights", 2, 3), {}, "DFlash with fused layers"),
        ("dflare", put("layer_fusion_weights", 2, 2), {}, "is 2 x 2, but 2 x 3 is needed"),
        ("dflare", drop("layers.1.self_attn.v_proj_target.weight"), {}, "no tensor 'layers.1.self_attn.v_proj_target.weight'"),
        ("dflare, speculators", drop("fusion_norms.1.weight"), {}, "no tensor 'fusion_norms.1.weight'"),
        ("domino, speculators, masks", None, {"pure_draft_prefix_len": 5}, "an integer from 0 to 4, below the guesses"),
        ("domino, speculators, masks", None, {"pure_draft_prefix_len": True}, "not True"),
        ("xpress", drop("xpress_head.w1.weight"), {}, "no tensor 'xpress_head.w1.weight'"),
        ("xpress", put("xpress_head.w1.weight", 59, 8), {}, "the refiner in .* knows 59 tokens"),
        ("xpress", put("xpress_head.in_proj.weight", 8, 16), {}, "8 x 24 is needed"),
        ("xpress", put("xpress_head.mix.L", 8, 5, 5), {}, "8 x 6 x 6 is needed"),
        ("xpress", put("xpress_head.w2.weight", 59, 8), {}, "60 x 8 is needed"),
        ("xpress", drop("xpress_head.mlp.up_proj.weight"), {}, "no tensor 'xpress_head.mlp.up_proj.weight'"),
        ("xpress", None, {"xpress_num_passes": 0}, "'xpress_num_passes' must be a positive integer"),
        ("xpress", None, {"xpress_mixer_format": "folded"}, "'xpress_mixer_format' is 'folded'"),
        ("xpress, speculators", drop("refiner_head.mix_l"), {}, "no tensor 'refiner_head.mix_l'"),
        ("xpress, speculators", None, {"num_jacobi_passes": True}, "'num_jacobi_passes' must be a positive integer"),
        ("z-lab", None, {"dflash_config": {"mask_token_id": 59, "attention_sink_bias": True}}, "attention sinks"),
        ("z-lab", put("layers.0.self_attn.sinks", 4), {}, "attention sinks"),
        ("dflare", None, {"rope_is_neox_style": False}, "DFlare whose rotary pairs lie side by side"),
        ("dspark, of LFM2", None, {"rope_is_neox_style": "no"}, "'rope_is_neox_style' must be true or false"),
        ("dspark, of Gemma 4", drop("layers.1.layer_scalar"), {}, "no tensor 'layers.1.layer_scalar'"),
        ("dspark, of Gemma 4", None, {"global_head_dim": 8}, "64 x 32, but 32 x 32 is needed"),
        ("z-lab", None, {"model_type": "gemma4_text"}, "layers like 'gemma4_text'"),
        ("z-lab", put("layers.0.self_attn.kv_a_proj_with_mqa.weight", 4, 4), {}, "is a multi-head latent attention drafter"),
        ("speculators", None, {"speculators_model_type": "xpress"}, "no tensor 'xpress_head.w1.weight'"),
        ("speculators", None, {"speculators_model_type": "later"}, "is a later drafter"),
        ("z-lab", None, {"model_type": "gpt_oss"}, "layers like 'gpt_oss'"),
        ("z-lab", drop("layers.1.mlp.up_proj.weight"), {}, "no tensor 'layers.1.mlp.up_proj.weight'"),
        ("z-lab", drop("fc.weight"), {}, "no tensor 'fc.weight'"),
        ("z-lab", put("fc.weight", 32, 64), {}, "reads states of 64 numbers"),
        ("z-lab", put("hidden_norm.weight", 48), {}, "is 48, but 32 is needed"),
        ("z-lab", None, {"dflash_config": {"target_layer_ids": [1, 3, 6]}}, "'mask_token_id' must be an integer"),
        ("z-lab", None, {"dflash_config": {"mask_token_id": 60, "target_layer_ids": [1, 3, 6]}}, "but the embedding has 60 rows"),
        ("z-lab", None, {"block_size": 65}, "2 to 64 tokens"),
        ("z-lab", None, {"block_size": 1}, "2 to 64 tokens"),
        ("z-lab", put("embed_tokens.weight", 50, 32), {}, "vocabulary of 50 tokens"),
        ("z-lab, wide", drop("embed_tokens.weight"), {}, "the target's cannot be used: it is 32 wide, not 48"),
        ("z-lab, wide", drop("lm_head.weight"), {}, "no lm_head.weight"),
        ("speculators", drop("d2t"), {}, "40 tokens of its own, but no d2t"),
        ("speculators", lambda tensors: tensors["d2t"].fill_(40), {}, "does not map"),
        ("dspark", None, {"block_size": None}, "'block_size' must be an integer"),
        ("dspark", None, {"markov_head_type": "causal"}, "not 'causal'"),
        ("dspark", drop("markov_head.markov_w1.weight"), {}, "no tensor 'markov_head.markov_w1.weight'"),
        ("dspark", put("markov_head.markov_w1.weight", 50, 8), {}, "knows 50 tokens"),
        ("dspark", put("markov_head.markov_w2.weight", 59, 8), {}, "60 x 8 is needed"),
        ("dspark, rnn", drop("markov_head.joint_proj.weight"), {}, "no tensor 'markov_head.joint_proj.weight'"),
        ("dspark", put("confidence_head.proj.weight", 1, 33), {}, "1 x 40 is needed"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, name: str, change: Change | None, config: dict[str, Any], words: str) -> None:
    with pytest.raises(SpeculativeConfigError, match=words):
        write(tmp_path, name, change, **config).load()


def test_a_mask_embedding_of_its_own_is_refused(tmp_path: Path) -> None:
    drafter = write(tmp_path, "z-lab")
    (drafter.folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(SpeculativeConfigError, match="mask_embedding.pt keeps the mask token's embedding outside"):
        drafter.load()


def test_more_tokens_than_a_block_has_are_refused(tmp_path: Path) -> None:
    drafter = write(tmp_path, "z-lab")
    assert drafter.open(num_speculative_tokens=5).max_tokens == 5
    with pytest.raises(SpeculativeConfigError, match="num_speculative_tokens 6 is more than .* its blocks have 5"):
        drafter.load(num_speculative_tokens=6)


@pytest.mark.parametrize(
    "name, change, words",
    [
        ("z-lab", None, ["DFlash in the layout of z-lab, 2 layers, reads the target's states before layers 2, 4, 7"]),
        ("z-lab", None, ["blocks of 6, bidirectional, first guess in the first mask's place", "head: the target's"]),
        ("z-lab", put("layers.0.left_over", 1), ["unused tensors: layers.0.left_over"]),
        ("z-lab, sliding", None, ["causal in layers 0, windows in layers 0"]),
        ("speculators", None, ["layout of speculators", "guesses 40 tokens of its own; embedding: its own, head: its own"]),
        ("lilicorr", None, ["LiLiCorr in the layout of z-lab", "lattice of each place's best 4: 2 layers of width 32"]),
        ("lilicorr, own width", None, ["convolutions of 2 tokens", "best 3: 2 layers of width 24"]),
        ("dspark", None, ["DSpark in the layout of DeepSeek", "Markov head: vanilla, confidence head: yes", "last known token's place"]),
        ("dspark, no heads", None, ["Markov head: none, confidence head: none"]),
        ("domino", None, ["Domino in the layout of z-lab", "last known token's place", "correction from guess 2 on: a state of 12"]),
        ("domino, masks", None, ["first guess in the first mask's place", "correction from guess 1 on"]),
        ("xpress", None, ["XPress in the layout of z-lab", "refiner: 6 passes over a block, rank 8"]),
        ("xpress, DFlash 2", None, ["convolutions of 2 tokens", "refiner: 1 passes", "begins with a candidate selector"]),
    ],
)
def test_what_was_found_is_told(tmp_path: Path, name: str, change: Change | None, words: list[str]) -> None:
    found = "\n".join(write(tmp_path, name, change).load().found)
    for part in words:
        assert part in found
    assert change is not None or "unused" not in found
    assert "nothing reads" not in found


def test_settings_that_nobody_knows_are_told(tmp_path: Path) -> None:
    inner = PUBLISHED["z-lab"].config["dflash_config"]
    drafter = write(tmp_path, "z-lab", dflash_config={**inner, "linear_context": True, "causal_head": False})
    assert "settings that nothing reads: linear_context" in drafter.load().found


def test_copies_of_the_targets_tables_are_kept_once(tmp_path: Path) -> None:
    """DSpark files bring the embedding and the head of their target."""
    drafter = write(tmp_path, "dspark")
    copies = load_file(drafter.target_folder / "model.safetensors")
    tensors = load_file(drafter.folder / "model.safetensors")
    tensors |= {"embed_tokens.weight": copies["model.embed_tokens.weight"], "lm_head.weight": copies["lm_head.weight"]}
    save_file(tensors, drafter.folder / "model.safetensors")
    assert "embedding: the target's, head: the target's" in "\n".join(drafter.load().found)


def test_settings_that_are_no_json_object_do_not_pass(tmp_path: Path) -> None:
    drafter = write(tmp_path, "z-lab")
    (drafter.folder / "config.json").write_text(json.dumps([1]))
    with pytest.raises(SpeculativeConfigError, match="must hold an object"):
        drafter.load()
