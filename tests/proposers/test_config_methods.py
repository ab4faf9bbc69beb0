"""Every method with its keys and defaults, as a speculative config says them."""

from typing import Any

import pytest

from foretoken.proposers.config import (
    BlockConfig,
    BlockTree,
    CustomConfig,
    DraftModelConfig,
    DynamicTree,
    EagleConfig,
    HiddenStatesConfig,
    LookaheadConfig,
    MedusaConfig,
    MlpSpeculatorConfig,
    MtpConfig,
    NgramCacheConfig,
    NgramConfig,
    OrthrusConfig,
    PardConfig,
    PredictionConfig,
    ProposerConfig,
    StaticTree,
    SuffixConfig,
    SyntheticConfig,
    UnoConfig,
)
from foretoken.proposers.config_reading import METHODS, parse_speculative_config


def only(value: dict[str, Any], target: str | None = None) -> ProposerConfig:
    config = parse_speculative_config(value, target)
    assert not config.warnings
    (proposer,) = config.proposers
    return proposer


NO_NETWORK = [
    ({"method": "ngram"}, NgramConfig(5, 5, 5)),
    ({"model": "[ngram]", "num_speculative_tokens": 3}, NgramConfig(3, 5, 5)),
    ({"model": "ngram"}, NgramConfig()),
    ({"method": "[ngram]"}, NgramConfig()),
    ({"method": "ngram_gpu"}, NgramConfig()),
    ({"method": "ngram", "prompt_lookup_max": 4}, NgramConfig(5, 4, 4)),
    ({"method": "ngram", "prompt_lookup_min": 2}, NgramConfig(5, 2, 2)),
    ({"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 7}, NgramConfig(5, 7, 2)),
    ({"method": "ngram", "match": "latest", "prompt_lookup_min": None}, NgramConfig(match="latest")),
    ({"method": "ngram", "num_branches": 12, "shared_pool": True}, NgramConfig(num_branches=12, shared_pool=True)),
    ({"method": "ngram_cache", "model": "M"}, NgramCacheConfig("M", 5)),
    ({"method": "ngram_cache", "model": "M", "num_speculative_tokens": 8, "revision": "main"}, NgramCacheConfig("M", 8, "main")),
    ({"method": "suffix", "suffix_decoding_max_cached_requests": 0}, SuffixConfig(max_cached_requests=0)),
    ({"method": "suffix", "suffix_decoding_min_token_prob": 0, "num_speculative_tokens": 9}, SuffixConfig(9, min_token_prob=0)),
    (
        {"method": "suffix", "suffix_decoding_max_tree_depth": 8, "suffix_decoding_max_spec_factor": 2.5, "use_tree": True},
        SuffixConfig(None, 8, max_spec_factor=2.5, use_tree=True),
    ),
    ({"method": "lookahead"}, LookaheadConfig(4, 3, 4)),
    ({"method": "lookahead_decoding", "max_window_size": 8, "max_ngram_size": 5, "max_verification_set_size": 7}, LookaheadConfig(8, 5, 7)),
    ({"method": "lookahead", "num_speculative_tokens": 7}, LookaheadConfig(num_speculative_tokens=7)),
    ({"method": "prediction", "num_speculative_tokens": 32}, PredictionConfig(32)),
    ({"method": "synthetic", "num_speculative_tokens": 3, "synthetic_acceptance_rates": [1]}, SyntheticConfig(3)),
    ({"method": "custom_class", "custom_class": "my.module:Guess", "options": {"a": 1}}, CustomConfig("my.module:Guess", 5, {"a": 1})),
    ({"custom_class": "./mine/guess.py:Guess", "num_speculative_tokens": 2}, CustomConfig("./mine/guess.py:Guess", 2)),
    ({"method": "custom_class", "model": "my.module.Guess"}, CustomConfig("my.module:Guess")),
    (
        {"method": "extract_hidden_states", "directory": "D", "layers": [2, 5, -1], "max_shard_tokens": 9},
        HiddenStatesConfig("D", (2, 5, -1), 9),
    ),
    (
        {"method": "extract_hidden_states", "num_speculative_tokens": 1, "shared_storage_path": "D",
         "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}},
        HiddenStatesConfig("D", (1, 2)),
    ),
]

NETWORKS = [
    ({"model": "org/a-draft"}, DraftModelConfig("org/a-draft")),
    (
        {"method": "draft_model", "draft_model": "D", "num_speculative_tokens": 3, "max_model_len": 99},
        DraftModelConfig("D", 3, max_model_len=99),
    ),
    ({"method": "draft_model", "model": "D", "draft_tensor_parallel_size": 2}, DraftModelConfig("D", draft_tensor_parallel_size=2)),
    (
        {"model": "D", "draft_sample_method": "probabilistic", "quantization": "int8", "revision": "main"},
        DraftModelConfig("D", draft_sample_method="probabilistic", quantization="int8", revision="main"),
    ),
    ({"model": "D", "assistant_confidence_threshold": 0.4}, DraftModelConfig("D", confidence_threshold=0.4)),
    ({"model": "D", "use_heterogeneous_vocab": True}, DraftModelConfig("D", vocabulary="intersection")),
    ({"model": "D", "use_heterogeneous_vocab": False}, DraftModelConfig("D")),
    ({"model": "D", "heterogeneous_vocab": "retokenize"}, DraftModelConfig("D", vocabulary="retokenize")),
    (
        {"model": "D", "use_heterogeneous_vocab": True, "heterogeneous_vocab": "retokenize"},
        DraftModelConfig("D", vocabulary="retokenize"),
    ),
    ({"model": "eagle3-shaped-name", "draft_layers": 4}, DraftModelConfig("eagle3-shaped-name", draft_layers=4)),
    ({"model": "D", "parallel_drafting": True}, PardConfig("D")),
    ({"method": "draft_model", "model": "D", "parallel_drafting": True, "num_speculative_tokens": 4}, PardConfig("D", 4)),
    ({"model": "amd/PARD-Qwen3-0.6B", "parallel_drafting": False}, DraftModelConfig("amd/PARD-Qwen3-0.6B")),
    ({"method": "pard", "model": "D", "max_model_len": 7, "quantization": "none"}, PardConfig("D", 8, 7, quantization="none")),
    ({"method": "medusa", "num_heads": 4}, MedusaConfig(None, 4, 4)),
    ({"method": "medusa", "num_heads": 4, "num_speculative_tokens": 2}, MedusaConfig(None, 2, 4)),
    (
        {"method": "medusa", "model": "M", "num_heads": 2, "medusa_choices": [[1], [0], [0, 0]]},
        MedusaConfig("M", 3, 2, StaticTree(((0,), (1,), (0, 0)))),
    ),
    (
        {"method": "hydra", "model": "H", "hydra_choices": [[0], [1]], "draft_sample_method": "probabilistic"},
        MedusaConfig("H", 2, None, StaticTree(((0,), (1,))), None, None, "hydra", "probabilistic"),
    ),
    (
        {"method": "redrafter", "model": "R", "speculative_token_tree": [[0], [1]], "draft_sample_method": "probabilistic"},
        MedusaConfig("R", 2, tree=StaticTree(((0,), (1,))), method="redrafter", draft_sample_method="probabilistic"),
    ),
    ({"model": "E", "draft_tensor_parallel_size": 1, "num_speculative_tokens": 5, "method": "eagle"}, EagleConfig("E", "eagle", 5)),
    ({"model": "E", "method": "eagle"}, EagleConfig("E", num_speculative_tokens=None)),
    ({"model": "E", "method": "eagle3", "num_speculative_tokens": 2}, EagleConfig("E", "eagle3", 2)),
    ({"model": "E", "method": "peagle", "parallel_drafting": True}, EagleConfig("E", "eagle3")),
    ({"model": "E", "method": "eagle3", "eagle_aux_hidden_state_layer_ids": [2, 9]}, EagleConfig("E", "eagle3", aux_layers=(2, 9))),
    (
        {"model": "E", "method": "eagle", "eagle_topk": 4, "num_steps": 5, "num_draft_tokens": 8},
        EagleConfig("E", "eagle", 7, tree=DynamicTree(4, 5, 7)),
    ),
    ({"method": "mtp", "draft_sample_method": "probabilistic"}, MtpConfig(draft_sample_method="probabilistic")),
    ({"method": "deepseek_mtp", "num_speculative_tokens": 1}, MtpConfig(1)),
    *(({"method": name}, MtpConfig()) for name in ("NEXTN", "FROZEN_KV_MTP", "draft-mtp")),
    *(({"method": name, "model": "D"}, DraftModelConfig("D")) for name in ("STANDALONE", "draft-simple", "draft_target")),
    *(({"method": name, "model": "E"}, EagleConfig("E", num_speculative_tokens=None)) for name in ("EAGLE", "EAGLE2", "HASS", "gumiho")),
    *(({"method": name, "model": "E"}, EagleConfig("E", "eagle3")) for name in ("EAGLE3", "draft-eagle3", "p-eagle")),
    ({"method": "mtp", "model": "a/speculator.mtp"}, MtpConfig(None, "a/speculator.mtp")),
    ({"method": "mlp_speculator", "model": "M", "quantization": "int4"}, MlpSpeculatorConfig("M", quantization="int4")),
    ({"method": "dflash", "model": "M", "parallel_drafting": True}, BlockConfig("M", "dflash")),
    ({"method": "dflash2", "model": "M"}, BlockConfig("M", "dflash")),
    ({"method": "DDTREE", "model": "M"}, BlockConfig("M", "dflash", 16, BlockTree(8, 16, 16))),
    ({"method": "jetspec", "model": "M", "num_draft_tokens": 33}, BlockConfig("M", "dflash", 32, BlockTree(8, 32, 32))),
    ({"method": "ddtree", "model": "M", "ddtree_budget": 9, "eagle_topk": 3}, BlockConfig("M", "dflash", 9, BlockTree(3, 9, 9))),
    (
        {"method": "dflash", "model": "M", "eagle_topk": 4, "num_steps": 7, "num_draft_tokens": 33},
        BlockConfig("M", "dflash", 32, BlockTree(4, 32, 7)),
    ),
    ({"method": "dflash", "model": "M", "eagle_topk": 1, "num_steps": 7}, BlockConfig("M", "dflash", 7)),
    ({"method": "dflare", "model": "M"}, BlockConfig("M", "dflash")),
    ({"method": "lilicorr", "model": "M"}, BlockConfig("M", "dflash")),
    ({"method": "domino", "model": "M"}, BlockConfig("M", "dflash")),
    ({"method": "xpress", "model": "M"}, BlockConfig("M", "dflash")),
    ({"method": "dspark", "model": "M", "confidence_threshold": 0.5}, BlockConfig("M", "dspark", confidence_threshold=0.5)),
    ({"method": "orthrus"}, OrthrusConfig()),
    ({"method": "orthrus", "num_speculative_tokens": 3, "draft_sample_method": "probabilistic"}, OrthrusConfig(3, "probabilistic")),
    ({"method": "uno", "uno_lora_path": "A"}, UnoConfig("A", 8, None, 0, 1, "probabilistic")),
    ({"method": "uno_adapter", "model": "A", "draft_sample_method": "greedy"}, UnoConfig("A", draft_sample_method="greedy")),
    (
        {"method": "UNO", "uno_lora_path": "A", "uno_mask_token_id": 9, "uno_noise_seed": 3, "uno_noise_low": 2},
        UnoConfig("A", 8, 9, 3, 2),
    ),
    ({"uno_lora_path": "s-sahoo/uno-qwen3-8B", "revision": "main"}, UnoConfig("s-sahoo/uno-qwen3-8B", revision="main")),
]


@pytest.mark.parametrize(("value", "expected"), [*NO_NETWORK, *NETWORKS])
def test_methods_and_defaults(value: dict[str, Any], expected: ProposerConfig) -> None:
    assert only(value) == expected


def test_every_method_is_read_above() -> None:
    types = {type(expected) for _, expected in (*NO_NETWORK, *NETWORKS)}
    assert types == set(ProposerConfig.__args__)
    assert {"off", *(value["method"] for value, _ in (*NO_NETWORK, *NETWORKS) if "method" in value)} >= set(METHODS)


def test_what_the_target_brings_along_needs_no_model() -> None:
    assert only({"method": "mtp", "model": "org/target"}, target="org/target") == MtpConfig()
    assert only({"method": "orthrus"}, target="foretoken-demo") == OrthrusConfig()  # of which it has none: the loader says so


@pytest.mark.parametrize("method", ["draft_model", "pard", "eagle", "eagle3", "medusa", "mtp", "mlp_speculator", "dflash", "ngram_cache"])
def test_the_embedded_model_has_drafters_of_its_own(method: str) -> None:
    (config,) = parse_speculative_config({"method": method}, "foretoken-demo").proposers
    assert getattr(config, "model") == f"foretoken-demo/{method}"  # noqa: B009
    (named,) = parse_speculative_config({"method": method, "model": "./mine"}, "foretoken-demo").proposers
    assert getattr(named, "model") == "./mine"  # noqa: B009
