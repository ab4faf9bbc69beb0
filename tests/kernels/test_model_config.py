"""Our class for Llama's settings against transformers' own."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from foretoken.kernels.model_config import LlamaConfig, config_class, read_model_config

GIVEN: list[dict[str, Any]] = [
    {},
    {"num_attention_heads": 8, "hidden_size": 64},
    {"num_key_value_heads": 4, "head_dim": 96, "tie_word_embeddings": True, "eos_token_id": [1, 2], "mlp_bias": True},
    {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}, "sliding_window": 8, "its_own": {"a": 1}},
]


@pytest.mark.parametrize("given", GIVEN)
def test_settings_and_what_they_leave_out_are_as_in_transformers(tmp_path: Path, given: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **given}))
    ours, theirs = read_model_config(tmp_path, "llama"), transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(ours) is config_class("llama") is LlamaConfig and type(theirs) is transformers.LlamaConfig
    assert ours.to_dict() == theirs.to_dict() and ours.name_or_path == theirs.name_or_path


@pytest.mark.parametrize(
    "wrong", [{"hidden_size": "64"}, {"hidden_size": None}, {"hidden_size": 30, "num_attention_heads": 4}, {"rope_parameters": 3}], ids=str
)
def test_what_transformers_refuses_is_refused(wrong: dict[str, Any]) -> None:
    for family in (LlamaConfig, transformers.LlamaConfig):
        with pytest.raises(Exception) as refused:
            family(**wrong)
        assert "Strict" in type(refused.value).__name__


def test_heads_of_a_width_of_their_own_need_not_share_the_hidden_size_evenly() -> None:
    assert LlamaConfig(hidden_size=1792, num_attention_heads=24, head_dim=128).head_dim == 128


def test_transformers_knows_it_by_its_name() -> None:
    assert transformers.MODEL_FOR_CAUSAL_LM_MAPPING[LlamaConfig] is transformers.LlamaForCausalLM


def test_other_families_are_read_by_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert type(read_model_config(tmp_path, "qwen3")) is config_class("qwen3") is transformers.Qwen3Config
