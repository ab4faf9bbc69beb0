import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from foretoken.proposers import LoadedDraft, Resources, build
from foretoken.proposers.config import (
    DraftModelConfig,
    EagleConfig,
    HeadConfig,
    MedusaConfig,
    MtpConfig,
    NgramConfig,
    PredictionConfig,
    ProposerConfig,
    SpeculativeConfig,
    SpeculativeConfigError,
    SuffixConfig,
    parse_speculative_config,
    read_speculative_config,
)


def only(value: dict[str, Any]) -> ProposerConfig:
    (proposer,) = parse_speculative_config(value).proposers
    return proposer


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"method": "ngram"}, NgramConfig(5, 5, 5)),
        ({"model": "[ngram]", "num_speculative_tokens": 3}, NgramConfig(3, 5, 5)),
        ({"model": "ngram"}, NgramConfig()),
        ({"method": "[ngram]"}, NgramConfig()),
        ({"method": "ngram_gpu"}, NgramConfig()),
        ({"method": "ngram", "prompt_lookup_max": 4}, NgramConfig(5, 4, 4)),
        ({"method": "ngram", "prompt_lookup_min": 2}, NgramConfig(5, 2, 2)),
        ({"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 7}, NgramConfig(5, 7, 2)),
        ({"method": "ngram", "match": "latest", "prompt_lookup_min": None}, NgramConfig(match="latest")),
        ({"model": "org/a-draft"}, DraftModelConfig("org/a-draft")),
        (
            {"method": "draft_model", "draft_model": "D", "num_speculative_tokens": 3, "max_model_len": 99},
            DraftModelConfig("D", 3, max_model_len=99),
        ),
        (
            {"method": "draft_model", "model": "D", "draft_tensor_parallel_size": 2},
            DraftModelConfig("D", draft_tensor_parallel_size=2),
        ),
        (
            {"model": "D", "draft_sample_method": "probabilistic", "quantization": "int8", "revision": "main"},
            DraftModelConfig("D", draft_sample_method="probabilistic", quantization="int8", revision="main"),
        ),
        ({"method": "medusa", "num_heads": 4}, MedusaConfig(None, 4, 4)),
        ({"method": "medusa", "num_heads": 4, "num_speculative_tokens": 2}, MedusaConfig(None, 2, 4)),
        ({"model": "E", "draft_tensor_parallel_size": 1, "num_speculative_tokens": 5, "method": "eagle"}, EagleConfig("E")),
        ({"model": "E", "method": "eagle3", "num_speculative_tokens": 2}, EagleConfig("E", "eagle3", 2)),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": 0}, SuffixConfig(max_cached_requests=0)),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 0, "num_speculative_tokens": 9}, SuffixConfig(9, min_token_prob=0)),
        ({"method": "deepseek_mtp", "num_speculative_tokens": 1}, MtpConfig(1)),
        ({"method": "mlp_speculator", "model": "M"}, HeadConfig("M", "mlp_speculator")),
        ({"method": "dflash", "model": "M"}, HeadConfig("M", "dflash")),
        ({"method": "prediction", "num_speculative_tokens": 32}, PredictionConfig(32)),
    ],
)
def test_methods_and_defaults(value: dict[str, Any], expected: ProposerConfig) -> None:
    assert only(value) == expected


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"method": "ngram", "num_speculative_tokenz": 3}, "did you mean 'num_speculative_tokens'"),
        ({"method": "ngrma"}, "did you mean 'ngram'"),
        ({"model": "D", "tensor_parallel_size": 2}, "draft_tensor_parallel_size"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "from 1 to 64"),
        ({"method": "ngram", "num_speculative_tokens": 65}, "from 1 to 64"),
        ({"method": "ngram", "num_speculative_tokens": True}, "integer"),
        ({"method": "ngram", "num_speculative_tokens": "5"}, "integer"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min 4 is above prompt_lookup_max 3"),
        ({"method": "draft_model"}, "needs a 'model'"),
        ({"num_speculative_tokens": 3}, "needs a 'method' or a 'model'"),
        ({"model": "D", "draft_model": "E"}, "another name of 'model'"),
        ({"model": "D", "model_": "E"}, "did you mean 'model'"),
        ({"method": "ngram", "rejection_sample_method": "synthetic"}, "lossy: not available yet"),
        ({"method": "ngram", "rejection_sample_method": "fly"}, "lossy: not available yet"),
        ({"method": "ngram", "acceptance_method": "typical_acceptance_sampler"}, "lossy: not available yet"),
        ({"method": "ngram", "rejection_sample_method": "block"}, "not available in this version"),
        ({"method": "ngram", "rejection_sample_method": "best"}, "'match' or 'standard'"),
        ({"method": "draft_model", "model": "D", "use_heterogeneous_vocab": True}, "another tokenizer"),
        ({"method": "medusa", "num_heads": 2, "num_speculative_tokens": 3}, "above num_heads 2"),
        ({"method": "ngram", "disable_by_batch_size": 0}, "'disable_by_batch_size' must be an integer from 1"),
        ({"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 4, 5], [4, 8, 2]]}, "[4, 8, 2] is not"),
        ({"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 4]]}, "[1, 4] is not"),
        ([], "empty list"),
        ([{"method": "ngram"}, {"method": "off"}], "cannot stand in a list"),
        ([{"method": "ngram", "disable_by_batch_size": 4}, {"model": "D", "disable_by_batch_size": 8}], "two values are given: 4 and 8"),
        ("ngram", "must be an object"),
        (["ngram"], "must be an object"),
    ],
)
def test_mistakes_name_the_key_and_the_remedy(value: Any, words: str) -> None:
    with pytest.raises(SpeculativeConfigError) as caught:
        parse_speculative_config(value)
    assert words in str(caught.value)


def test_settings_for_all_proposers() -> None:
    config = parse_speculative_config(
        {
            "method": "ngram",
            "disable_by_batch_size": 4,
            "num_speculative_tokens_per_batch_size": [[1, 4, 5], [5, 8, 0]],
            "rejection_sample_method": "standard",
            "acceptance_method": "rejection_sampler",
            "adaptive": False,
        }
    )
    assert config == SpeculativeConfig((NgramConfig(),), 4, ((1, 4, 5), (5, 8, 0)), "standard")
    assert "k is fixed" in parse_speculative_config({"method": "ngram", "adaptive": True}).warnings[0]


def test_several_proposers_keep_their_order() -> None:
    config = parse_speculative_config([{"model": "D"}, {"method": "ngram", "disable_by_batch_size": 4}])
    assert config == SpeculativeConfig((DraftModelConfig("D"), NgramConfig()), disable_by_batch_size=4)


def test_known_keys_without_effect_warn_once_and_null_is_not_given() -> None:
    config = parse_speculative_config({"method": "ngram", "enforce_eager": True, "moe_backend": "x", "quantization": None})
    assert config == SpeculativeConfig((NgramConfig(),), warnings=config.warnings)
    assert config.warnings == ("speculative config: no effect with method 'ngram', ignored: enforce_eager, moe_backend",)


@pytest.mark.parametrize("text", ['{"method": "off"}', "method: off", "{method: 'off'}"])
def test_off_in_json_and_in_yaml_where_it_is_a_boolean(text: str) -> None:
    assert read_speculative_config(text) == SpeculativeConfig(off=True)


def test_reading_text_and_files(tmp_path: Path) -> None:
    expected = SpeculativeConfig((NgramConfig(3, 4, 4),))
    (tmp_path / "config.yaml").write_text("method: ngram\nnum_speculative_tokens: 3\nprompt_lookup_max: 4\n")
    assert read_speculative_config(f"@{tmp_path}/config.yaml") == expected
    assert read_speculative_config((tmp_path / "config.yaml").read_text()) == expected
    assert read_speculative_config('[{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":4}]') == expected
    with pytest.raises(SpeculativeConfigError, match="cannot read"):
        read_speculative_config(f"@{tmp_path}/missing.yaml")
    with pytest.raises(SpeculativeConfigError, match="neither JSON nor YAML"):
        read_speculative_config("{method: [")


@pytest.mark.parametrize(
    ("config", "tensors", "expected"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, ["model.embed_tokens.weight", "lm_head.weight"], DraftModelConfig),
        ({"architectures": ["LlamaForCausalLM"]}, ["fc.weight", "layers.0.mlp.up_proj.weight"], EagleConfig),
        ({"architectures": ["EagleLlamaForCausalLM"]}, [], EagleConfig),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, [], EagleConfig),
        ({"speculators_model_type": "eagle3"}, [], EagleConfig),
        ({"model_type": "medusa"}, ["0.0.linear.weight"], MedusaConfig),
        ({"medusa_num_heads": 2}, [], MedusaConfig),
        ({"model_type": "mlp_speculator"}, [], HeadConfig),
        ({"architectures": ["Qwen3ForCausalLM"], "pard_token": 1}, [], HeadConfig),
        ({"architectures": ["DFlashDraftModel"]}, ["fc.weight"], HeadConfig),
    ],
)
def test_method_is_found_in_the_model_folder(tmp_path: Path, config: dict[str, Any], tensors: list[str], expected: type) -> None:
    folder = _folder(tmp_path / "m", config, tensors)
    assert type(only({"model": str(folder)})) is expected


def test_eagle3_is_told_from_eagle_by_content(tmp_path: Path) -> None:
    names = ["fc.weight", "midlayer.hidden_norm.weight"]
    assert only({"model": str(_folder(tmp_path / "m", {"architectures": ["LlamaForCausalLM"]}, names))}) == EagleConfig(
        str(tmp_path / "m"), "eagle3"
    )


def _folder(folder: Path, config: dict[str, Any], tensors: list[str]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if tensors:
        save_file({name: torch.zeros(1) for name in tensors}, folder / "model.safetensors")
    return folder


def _resources(target_folder: Path) -> Resources:
    def load(config: DraftModelConfig) -> LoadedDraft:
        raise AssertionError("no draft model is asked for")

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    return Resources(load, lambda executors: [], tokenizer, 1, target_folder)


def _refusal(value: dict[str, Any], target_folder: Path) -> str:
    with pytest.raises(SpeculativeConfigError) as caught:
        build(parse_speculative_config(value), _resources(target_folder))
    return str(caught.value)


def test_build_puts_predictions_first_and_off_builds_nothing(tmp_path: Path) -> None:
    def names(*values: dict[str, Any]) -> tuple[str, ...]:
        return build(parse_speculative_config(values), _resources(tmp_path)).names

    assert names({"method": "ngram"}) == ("prediction", "ngram")
    assert names({"method": "ngram"}, {"method": "prediction"}, {"method": "ngram"}) == ("prediction", "ngram", "ngram_2")
    assert names({"method": "off"}) == ()
    assert build(SpeculativeConfig(), _resources(tmp_path)).names == ("prediction",)


@pytest.mark.parametrize(
    "value", [{"method": "suffix"}, {"method": "mtp"}, {"method": "eagle", "model": "E"}, {"method": "pard", "model": "P"}]
)
def test_methods_of_later_versions_are_known_and_refused(tmp_path: Path, value: dict[str, Any]) -> None:
    message = _refusal(value, tmp_path)
    assert f"{value['method']!r} is known and not available" in message and "ngram, draft_model" in message


def test_medusa_heads_are_counted_in_the_folder(tmp_path: Path) -> None:
    assert str(tmp_path) in _refusal({"method": "medusa", "num_heads": 4}, tmp_path)
    heads = [name for h in range(5) for name in (f"medusa_head.{h}.0.linear.weight", f"medusa_head.{h}.1.weight")]
    folder = _folder(tmp_path / "heads", {"medusa_num_heads": 2}, [*heads, "model.layers.7.mlp.up_proj.weight"])
    assert "holds 5" in _refusal({"method": "medusa", "num_heads": 6}, folder)
    assert "known and not available" in _refusal({"method": "medusa", "num_heads": 5}, folder)
    vllm_layout = _folder(tmp_path / "vllm", {}, ["blocks.0.layers.0.weight", "blocks.1.layers.0.weight", "lm_heads.0.weight"])
    assert "holds 2" in _refusal({"method": "medusa", "model": str(vllm_layout), "num_heads": 3}, tmp_path)
