"""What is read from a drafter's folder, what is told about it, and what is refused with which words."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_checkpoints import PUBLISHED, Drafter, Published, sizes
from eagle_reference import Target
from quantised_checkpoints import quantise
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken.proposers.config import DynamicTree
from foretoken.proposers.config_entry import SpeculativeConfigError
from foretoken.proposers.detection import detect_method

Change = Callable[[dict[str, Any]], Any]
LATENT = "eagle3, latent attention"


def edit(drafter: Drafter, config: Mapping[str, Any] = {}, tensors: Change = lambda t: None) -> Drafter:
    """config: settings to change, None = to leave out; tensors changes the file's in place."""
    path = drafter.folder / "config.json"
    changed = {**json.loads(path.read_text()), **config}
    path.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))
    loaded = load_file(drafter.folder / "model.safetensors")
    tensors(loaded)
    save_file(loaded, drafter.folder / "model.safetensors")
    return drafter


def found(drafter: Drafter, **settings: Any) -> str:
    return "\n".join(drafter.load(**settings).found)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("eagle", ["EAGLE in the layout of EAGLE, 1 layer,", "last state", "embedding: the target's, head: the target's"]),
        ("eagle, qwen2, prefixed", ["2 layers", "the target's vocabulary; embedding: the target's, head: the target's"]),
        ("gumiho", ["Gumiho in the layout of EAGLE, 2 layers and 2 heads behind them, 4 guesses at most, reads the target's last state"]),
        ("eagle3", ["EAGLE-3 in the layout of EAGLE", "before layers 2, 4, 5", "40 tokens of its own; embedding: the target's"]),
        ("eagle3, qwen3", ["before layers 2, 3, 5, 7, 8", "the target's vocabulary; embedding: its own, head: its own"]),
        ("eagle3, speculators", ["EAGLE-3 in the layout of speculators, 2 layers", "before layers 1, 4, 7"]),
        ("eagle3, last state", ["the target's last state", "40 tokens"]),
        (LATENT, ["EAGLE-3 in the layout of EAGLE, 2 layers with latent attention, reads", "before layers 1, 4, 7"]),
        ("p-eagle", ["P-EAGLE in the layout of speculators", "embedding: its own"]),
    ],
)
def test_what_is_told(tmp_path: Path, name: str, words: list[str]) -> None:
    """Leftovers of training are not worth a word, tensors that nobody knows are."""
    drafter = Drafter.write(PUBLISHED[name], tmp_path)
    said = found(drafter)
    assert all(word in said for word in words) and "unused" not in said, said
    edit(drafter, tensors=lambda t: t.update({"selector.weight": torch.zeros(2)}))
    assert "unused tensors: selector.weight" in found(drafter)


def test_a_second_layer_may_have_a_norm_that_nobody_applies(tmp_path: Path) -> None:
    """Where all layers are of one class, as in some training code."""
    drafter = Drafter.write(PUBLISHED["eagle3, speculators"], tmp_path)
    plain = first_confidence(drafter)
    edit(drafter, tensors=put("layers.1.hidden_norm.weight", torch.zeros(32)))
    assert first_confidence(drafter) == plain and "unused tensors: layers.1.hidden_norm.weight" in found(drafter)


def test_other_spellings(tmp_path: Path) -> None:
    """`speculators` calls EAGLE-1's parts fusion_fc and transformer; the norms of taps once were called low, mid and high."""
    old = {"fc.": "fusion_fc.", "layers.0.": "transformer."}

    def rename(name: str) -> str:
        return next((new + name.removeprefix(part) for part, new in old.items() if name.startswith(part)), name)

    eagle = PUBLISHED["eagle"]
    settings = {"speculators_model_type": "eagle", "transformer_layer_config": dict(eagle.config), "fusion_bias": True, "layernorms": False}
    assert_same_guesses(tmp_path, eagle, Published(eagle.spec, settings, rename, eagle.more))
    nvidia = PUBLISHED["eagle3, NVIDIA"]
    low = {"fc_norm.0.": "aux_norm_low.", "fc_norm.1.": "aux_norm_mid.", "fc_norm.2.": "aux_norm_high."}

    def rename_norms(name: str) -> str:
        return next((new + name.removeprefix(part) for part, new in low.items() if name.startswith(part)), name)

    assert_same_guesses(tmp_path, nvidia, replace(nvidia, rename=rename_norms))


def assert_same_guesses(folder: Path, *ways: Published) -> None:
    def guess(published: Published) -> list[float]:
        engine = Drafter.write(published, folder).run(num_speculative_tokens=4)
        engine.add("a", [5, 3, 1])
        engine.step(lambda *_: ((), 7))
        return engine.step(lambda *_: ((), 7))["a"].confidence

    first, *others = [guess(published) for published in ways]
    assert first and all(other == first for other in others)


@pytest.mark.parametrize(("name", "stored"), [("eagle3", "fp8"), ("eagle3", "w4a16"), (LATENT, "fp8")])
def test_quantised_weights_guess_as_the_same_numbers_in_plain(tmp_path: Path, name: str, stored: str) -> None:
    drafter = Drafter.write(PUBLISHED[name], tmp_path)
    plain = quantise(drafter.folder, stored, re.compile(r"(proj|mqa|fc)\.weight$"))
    assert stored != "fp8" or detect_method(str(drafter.folder)) == "eagle3"
    assert "unused" not in found(drafter)
    quantised = first_confidence(drafter)
    save_file(dict(plain), drafter.folder / "model.safetensors")
    assert first_confidence(edit(drafter, {"quantization_config": None})) == quantised


def test_rope_scaling_is_its_own(tmp_path: Path) -> None:
    """Linear scaling by 2 with half the theta's power is seen in the table, whatever the target has."""
    drafter = Drafter.write(PUBLISHED["eagle3"], tmp_path)
    plain = first_confidence(drafter)
    assert first_confidence(edit(drafter, {"rope_scaling": {"type": "linear", "factor": 8.0}})) != pytest.approx(plain, abs=1e-4)
    assert first_confidence(edit(drafter, {"rope_scaling": None, "rope_theta": 500000.0})) != pytest.approx(plain, abs=1e-4)
    assert first_confidence(edit(drafter, {"rope_theta": 10000.0})) == plain
    vision = {"type": "mrope", "mrope_section": [1, 1, 2]}  # Qwen2.5-VL's: three positions, which are one in text
    apart = first_confidence(edit(drafter, {"rope_theta": 500000.0}))
    assert first_confidence(edit(drafter, {"rope_theta": 500000.0, "rope_scaling": vision})) == apart != plain
    parts = {"full_attention": {"rope_theta": 10000.0}, "sliding_attention": {"rope_theta": 500000.0, "rope_type": "default"}}
    assert first_confidence(edit(drafter, {"rope_theta": None, "rope_scaling": None, "rope_parameters": parts})) == apart
    dynamic = {"rope_type": "dynamic", "factor": 8.0}  # which sets in behind what it reads
    assert first_confidence(edit(drafter, {"rope_parameters": None, "rope_scaling": dynamic})) == plain


def first_confidence(drafter: Drafter) -> list[float]:
    engine = drafter.begun(prompt=[5, 3, 1, 8, 9, 2], num_speculative_tokens=2)
    return engine.step(lambda *_: ((), 7))["a"].confidence


def test_layers_may_be_named_by_the_user(tmp_path: Path) -> None:
    drafter = Drafter.write(PUBLISHED["eagle3"], tmp_path)
    assert "before layers 1, 2, 6" in found(drafter, aux_layers=(1, 2, 6))
    with pytest.raises(SpeculativeConfigError, match=r"reads states of 96 numbers, but the target's layers 1, 2 have 2 x 32"):
        drafter.load(aux_layers=(1, 2))


def drop(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("name", "config", "tensors", "words"),
    [
        ("eagle", {"hidden_size": 48}, drop("embed_tokens.weight"), "was trained for a target of hidden size 48, this one has 32"),
        ("gumiho", {}, drop("mlp.mlp.1.2.linear.weight"), "incomplete: head 1 has no layer 2"),
        ("gumiho", {}, put("mlp.mlp.1.2.linear.weight", torch.zeros(32, 9)), "is 32 x 9, but 32 x 32 is needed"),
        ("gumiho", {}, put("enorm.weight", torch.zeros(32)), r"norms that no known drafter of its kind has \(enorm"),
        ("eagle3", {"target_hidden_size": 64}, None, "was trained for a target of hidden size 64"),
        ("eagle3", {"vocab_size": 128}, drop("t2d"), "was trained for a vocabulary of 128 tokens"),
        ("eagle3", {}, put("t2d", torch.zeros(128, dtype=torch.bool)), r"vocabulary of 128 tokens \(its t2d\)"),
        ("eagle", {}, put("embed_tokens.weight", torch.zeros(50, 32)), "vocabulary of 50 tokens"),
        ("eagle3", {}, put("d2t", torch.full((40,), 30)), "does not map the draft's vocabulary"),
        ("eagle3", {}, put("d2t", torch.zeros(39, dtype=torch.long)), "'d2t'.* is 39, but 40 is needed"),
        ("eagle3", {}, drop("d2t"), "but no d2t"),
        ("eagle3", {}, drop("lm_head.weight"), "has no tensor 'lm_head.weight'"),
        ("eagle3", {}, drop("fc.weight"), "has no tensor 'fc.weight'"),
        ("eagle3", {}, drop("midlayer.self_attn.q_proj.weight"), "has no tensor 'layers.0.self_attn.q_proj.weight'"),
        ("eagle3", {}, drop("midlayer.mlp.up_proj.weight"), "has no tensor 'layers.0.mlp.up_proj.weight'"),
        ("eagle3", {"intermediate_size": 64}, None, "is 48 x 32, but 64 x 32 is needed"),
        ("eagle3", {"num_attention_heads": "four"}, None, "is no valid llama config"),
        ("eagle3", {"layer_types": 1}, None, "is no valid llama config"),
        ("eagle3", {}, put("norm.weight", torch.full((32,), torch.nan)), "NaN"),
        ("eagle3", {"norm_before_fc": True}, None, "has no tensor 'input_norm.weight'"),
        ("eagle3", {"norm_before_fc": True, "fc_norm": True}, None, "only one can be meant"),
        ("eagle3", {"eagle_config": {"use_mtp_layernorm": True}}, None, "'use_mtp_layernorm' to True"),
        ("eagle3", {"eagle_config": {"parallel_draft_step": 4}}, None, "'parallel_draft_step' above 1"),
        (LATENT, {"num_attention_heads": 3}, None, "3 heads .* cannot have made keys and values of 152 numbers and results of 128"),
        (LATENT, {"num_attention_heads": None}, None, "None heads .* cannot have made"),
        (LATENT, {"num_attention_heads": 8}, None, "q_b_proj.weight' in .* is 56 x 12, but 88 x 12 is needed"),
        (LATENT, {}, drop("midlayer.self_attn.kv_b_proj.weight"), "has no tensor 'layers.0.self_attn.kv_b_proj.weight'"),
        (LATENT, {}, drop("layers.1.self_attn.q_b_proj.weight"), "has no tensor 'layers.1.self_attn.q_b_proj.weight'"),
        ("eagle", {}, put("embed_layernorm.weight", torch.ones(32)), r"norms that no known drafter of its kind has \(embed_layernorm"),
        ("eagle", {}, put("layers.0.input_layernorm.weight", torch.ones(32)), "norms that no known drafter of its kind has"),
        ("eagle3", {}, put("midlayer.mlp.experts.0.up_proj.weight", torch.zeros(2, 2)), "a drafter with experts"),
        ("eagle3", {}, put("midlayer.self_attn.sinks", torch.zeros(4)), "a drafter with attention sinks"),
        ("eagle3", {}, put("midlayer.mlp.up_proj.weight_scale", torch.ones(1)), "quantised weights .midlayer.mlp.up_proj.weight_scale"),
        ("p-eagle", {"mask_token_id": 60}, None, "'mask_token_id' is 60, but the embedding has 60 rows"),
        ("p-eagle", {"mask_token_id": None}, None, "'mask_token_id' must be an integer"),
        ("p-eagle", {}, drop("mask_hidden"), "has no tensor 'mask_hidden'"),
        ("p-eagle", {}, put("mask_hidden", torch.zeros(1, 1, 64)), "1 x 1 x 64, but 1 x 1 x 96 is needed"),
        ("eagle3, qwen3", {}, drop("embed_tokens.weight"), "has no embed_tokens.weight, and the target's .* is 32 wide, not 48"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, name: str, config: dict[str, Any], tensors: Change | None, words: str) -> None:
    drafter = edit(Drafter.write(PUBLISHED[name], tmp_path), config, tensors or (lambda t: None))
    with pytest.raises(SpeculativeConfigError, match=words):
        drafter.load()


@pytest.mark.parametrize("name", ["p-eagle", "gumiho"])
def test_what_guesses_chains_has_no_tree(tmp_path: Path, name: str) -> None:
    with pytest.raises(SpeculativeConfigError, match="leave the tree out"):
        Drafter.write(PUBLISHED[name], tmp_path).load(tree=DynamicTree(3, 3, 8))


def test_a_gumiho_guesses_as_many_tokens_as_it_has_heads_for(tmp_path: Path) -> None:
    drafter = Drafter.write(PUBLISHED["gumiho"], tmp_path)
    assert [drafter.open(num_speculative_tokens=asked).max_tokens for asked in (None, 3, 5)] == [4, 3, 4]


def test_layers_without_a_word_in_the_config_are_like_the_targets(tmp_path: Path) -> None:
    drafter = Drafter.write(PUBLISHED["gumiho"], tmp_path)
    said = first_confidence(drafter)
    (drafter.folder / "config.json").unlink()
    drafter.target_config = sizes(drafter.spec)
    assert first_confidence(drafter) == said and detect_method(str(drafter.folder)) == "eagle"


@pytest.mark.parametrize("key", ["mask_token_id", "ptd_token_id", "pard_token"])
def test_the_mask_token_has_three_names_and_may_lie_behind_the_vocabulary(tmp_path: Path, key: str) -> None:
    def one_row_more(tensors: dict[str, Tensor]) -> None:
        tensors["embed_tokens.weight"] = torch.cat([tensors["embed_tokens.weight"], torch.ones(1, 32)])

    drafter = edit(Drafter.write(PUBLISHED["p-eagle"], tmp_path), {"mask_token_id": None, key: 60}, one_row_more)
    engine = drafter.begun(prompt=[5, 3, 1])
    assert len(engine.step(lambda *_: ((), 7))["a"].tokens) == 4


def test_the_state_of_the_mask_has_two_dimensions_or_three(tmp_path: Path) -> None:
    drafter = Drafter.write(PUBLISHED["p-eagle"], tmp_path)
    three = first_confidence(drafter)
    assert first_confidence(edit(drafter, tensors=lambda t: t.update(mask_hidden=t["mask_hidden"][0]))) == three


def test_copies_of_the_targets_tables_are_shared_and_others_kept(tmp_path: Path) -> None:
    published = PUBLISHED["eagle"]
    target = Target(published.spec)
    drafter = Drafter.write(replace(published, more={**published.more, "lm_head.weight": target.head}), tmp_path)
    assert "embedding: the target's, head: the target's" in found(drafter)
    edit(drafter, tensors=put("lm_head.weight", target.head + 1e-3))
    assert "embedding: the target's, head: its own" in found(drafter)
    edit(drafter, tensors=put("embed_tokens.weight", target.embedding.half()))
    assert "embedding: its own, head: its own" in found(drafter)
