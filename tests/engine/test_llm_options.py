"""Keyword arguments of LLM as settings of the engine, and what is refused."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foretoken.engine.config import DEMO_MODEL, EngineConfig, SchedulerConfig
from foretoken.engine.errors import ConfigError
from foretoken.engine.llm_options import IGNORED, LONGEST_UNSEEN_S, OUR_NAMES, engine_config
from foretoken.proposers.config import MtpConfig, NgramConfig, SpeculativeConfig


def made(**options: Any) -> EngineConfig:
    return engine_config("folder", None, options)


def test_defaults_are_the_engines() -> None:
    config = engine_config(None, None, {})
    assert config == EngineConfig(scheduler=SchedulerConfig(longest_unseen_s=LONGEST_UNSEEN_S)) and config.model.model == DEMO_MODEL
    assert engine_config(Path("a/b"), None, {}).model.model == "a/b"


def test_every_option_reaches_its_setting() -> None:
    config = made(
        max_model_len=256, max_num_seqs=7, max_num_batched_tokens=64, kv_cache_gb=0.5, dtype=torch.float32, seed=3,
        gpu_memory_utilization=0.6, enable_prefix_caching=False, served_model_name=["a", "b"], executor="torch",
        num_gpu_blocks_override=np.int64(9), tensor_parallel_size=1, quantization="INT8", kv_cache_dtype=torch.float32, threads=2,
        disable_log_stats=True, tokenizer=Path("a/b"),
    )
    model, cache, scheduler = config.model, config.cache, config.scheduler
    assert (model.max_model_len, model.dtype, model.seed, model.served_model_name, model.executor) == (256, "float32", 3, "a", "torch")
    assert (model.quantization, model.kv_cache_dtype, model.threads, model.tokenizer) == ("int8", "float32", 2, "a/b")
    assert (cache.kv_cache_gb, cache.memory_share, cache.enable_prefix_caching, cache.num_blocks) == (0.5, 0.6, False, 9)
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (7, 64)


@pytest.mark.parametrize(
    "value",
    [
        {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2},
        [{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}],
        '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}',
        SpeculativeConfig((NgramConfig(3, 2, 2),)),
    ],
)
def test_speculative_config_in_every_form(value: Any) -> None:
    config = engine_config(None, value, {}).speculative
    assert config is not None and config.proposers == (NgramConfig(3, 2, 2),)


def test_method_off_switches_off() -> None:
    config = engine_config(None, {"method": "off"}, {}).speculative
    assert config is not None and config.off


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 4}, ["tensor_parallel_size 4", "one device", "found here"]),
        ({"gpu_memory_utilization": 1.5}, ["gpu_memory_utilization"]),
        ({"gpu_memory_utilization": 0}, ["gpu_memory_utilization"]),
        ({"gpu_memory_utilization": "0.9"}, ["gpu_memory_utilization must be a number", "'0.9'"]),
        ({"kv_cache_gb": "1"}, ["kv_cache_gb must be a number", "'1'"]),
        ({"kv_cache_gb": float("nan")}, ["kv_cache_gb", "nan"]),
        ({"seed": 1.5}, ["seed must be an integer, not 1.5"]),
        ({"enable_prefix_caching": "False"}, ["enable_prefix_caching must be True or False, not 'False'"]),
        *(({"enable_lora": ones(2)}, ["enable_lora must be one value, not", "([1., 1.])"]) for ones in (np.ones, torch.ones)),
        ({"data_parallel_size": np.ones(2)}, ["data_parallel_size must be one value"]),
        ({"tensor_parallel_size": "2"}, ["tensor_parallel_size '2'"]),
        ({"max_model_len": "512"}, ["max_model_len", "positive integer"]),
        ({"max_num_seqs": 0}, ["max_num_seqs"]),
        ({"quantization": "hqq"}, ["'hqq'", "int8 and int4"]),
        ({"kv_cache_dtype": "fp8_e5m2"}, ["'fp8_e5m2'", "int8 on CPUs and fp8 (e4m3) on GPUs"]),
        ({"kv_cache_dtype": "half"}, ["'half'", "auto, int8, fp8, fp8_e4m3, bfloat16, float32"]),
        ({"executor": "program"}, ["'program'", "auto, native, torch, transformers"]),
        ({"max_num_seqs": True}, ["max_num_seqs"]),
        ({"speculative_model": "[ngram]"}, ["speculative_model", "speculative_config"]),
    ],
)
def test_values_that_cannot_work(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        made(**options)
    assert all(word in str(caught.value) for word in words)


def test_corpora_and_synthetic_acceptance() -> None:
    synthetic = {"method": "synthetic", "synthetic_acceptance_rates": [0.7]}
    with pytest.raises(ConfigError, match="allow_synthetic_acceptance=True"):
        engine_config(None, synthetic, {})
    config = engine_config(None, synthetic, {"allow_synthetic_acceptance": True, "speculation_corpus_dir": Path("a/b")})
    assert config.allow_synthetic_acceptance and config.speculation_corpus_dir == "a/b"


def test_the_served_models_own_draft_layers_need_no_name() -> None:
    config = engine_config("T", {"method": "mtp", "model": "T"}, {}).speculative
    assert config is not None and config.proposers == (MtpConfig(),)


def test_a_wrong_speculative_config_says_where() -> None:
    with pytest.raises(ConfigError, match="speculative_config: .*nonsense"):
        engine_config(None, {"method": "ngram", "nonsense": 1}, {})


@pytest.mark.parametrize(("name", "near"), [("max_model_length", "max_model_len"), ("max_num_seq", "max_num_seqs"), ("modell", "model")])
def test_unknown_options_name_the_nearest(name: str, near: str) -> None:
    with pytest.raises(TypeError, match=f"{name}.*did you mean '{near}'"):
        made(**{name: 1})


def test_vllms_other_options_warn_once_together() -> None:
    with pytest.warns(UserWarning) as caught:
        made(swap_space=4, enforce_eager=True, trust_remote_code=None, disable_chunked_mm_input=True, hf_overrides={"rope_theta": 1})
    told = "disable_chunked_mm_input, enforce_eager, hf_overrides (config.json is read as it is), swap_space"
    assert len(caught) == 1 and told in str(caught[0].message)


def test_what_cannot_be_followed_warns() -> None:
    with pytest.warns(UserWarning, match="float16") as caught:
        assert made(dtype="float16").model.dtype == "auto"
    assert caught[0].filename == __file__, "who made the LLM, not who called that"


def test_no_option_is_both_ours_and_ignored() -> None:
    assert IGNORED.isdisjoint(OUR_NAMES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(disable_log_stats=True, dtype="float")
