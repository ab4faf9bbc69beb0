"""Reading a speculative config: its forms, what holds for all proposers, and what is said about mistakes."""

from pathlib import Path
from typing import Any

import pytest

from foretoken.proposers.config import DraftModelConfig, NgramConfig, SpeculativeConfig
from foretoken.proposers.config_entry import SpeculativeConfigError
from foretoken.proposers.config_reading import parse_speculative_config, read_speculative_config


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"method": "ngram", "num_speculative_tokenz": 3}, "did you mean 'num_speculative_tokens'"),
        ({"method": "ngrma"}, "did you mean 'ngram'"),
        ({"method": 7}, "unknown speculative method 7"),
        ({"model": "D", "tensor_parallel_size": 2}, "draft_tensor_parallel_size"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "from 1 to 64"),
        ({"method": "ngram", "num_speculative_tokens": 65}, "from 1 to 64"),
        ({"method": "ngram", "num_speculative_tokens": True}, "integer"),
        ({"method": "ngram", "num_speculative_tokens": "5"}, "integer"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min 4 is above prompt_lookup_max 3"),
        ({"method": "ngram", "num_branches": 13}, "'num_branches' 13 x 'num_speculative_tokens' 5 = 65 guesses, above 64"),
        ({"method": "ngram", "shared_pool": "yes"}, "'shared_pool' must be true or false"),
        ({"method": "draft_model"}, "needs a 'model'"),
        ({"num_speculative_tokens": 3}, "needs a 'method' or a 'model'"),
        ({"model": "D", "draft_model": "E"}, "'model' and 'draft_model' are names of one setting"),
        ({"model": "D", "model_": "E"}, "did you mean 'model'"),
        ({"model": "D", "assistant_confidence_threshold": 2}, "'assistant_confidence_threshold' must be a number from 0 to 1"),
        ({"model": "D", "confidence_threshold": float("nan")}, "must be a number from 0 to 1, not nan"),
        ({"model": "D", "use_heterogeneous_vocab": False, "heterogeneous_vocab": "retokenize"}, "contradicts"),
        ({"model": "D", "heterogeneous_vocab": "union"}, "'intersection' or 'retokenize'"),
        ({"model": "D", "quantization": "gptq"}, "'quantization' must be 'int8' or 'fp8' or 'int4' or 'none'"),
        ({"method": "medusa", "num_heads": 2, "num_speculative_tokens": 3}, "above num_heads 2"),
        ({"method": "hydra"}, "method 'hydra' needs a 'model'"),
        ({"method": "medusa", "num_heads": 1, "medusa_choices": [[1], [1, 0]]}, "'medusa_choices' is 2 levels deep"),
        ({"method": "eagle3", "model": "E", "eagle_aux_hidden_state_layer_ids": [9, 2]}, "'eagle_aux_hidden_state_layer_ids' must name"),
        ({"method": "eagle3", "model": "E", "layers": [2, 2]}, "'layers' must be a list of different integers"),
        ({"method": "custom_class"}, "needs a 'custom_class'"),
        ({"custom_class": "Guess"}, "'custom_class' must be 'module:Class'"),
        ({"custom_class": "mine.guess:"}, "not 'mine.guess:'"),
        ({"custom_class": "m:C", "options": ["a"]}, "'options' must be an object"),
        ({"method": "extract_hidden_states"}, "needs a 'directory'"),
        (
            {"method": "extract_hidden_states", "directory": "D",
             "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ["1"]}}},
            "'eagle_aux_hidden_state_layer_ids' must be a list",
        ),
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
            "method": "ngram", "disable_by_batch_size": 4, "num_speculative_tokens_per_batch_size": [[1, 4, 5], [5, 8, 0]],
            "rejection_sample_method": "standard", "acceptance_method": "rejection_sampler", "adaptive": False,
        }
    )
    assert config == SpeculativeConfig((NgramConfig(),), False, 4, ((1, 4, 5), (5, 8, 0)), "standard")
    assert parse_speculative_config({"method": "ngram"}).adaptive
    assert not parse_speculative_config({"method": "ngram", "adaptive": False}).adaptive


def test_several_proposers_keep_their_order() -> None:
    config = parse_speculative_config([{"model": "D"}, {"method": "ngram", "disable_by_batch_size": 4}])
    assert config == SpeculativeConfig((DraftModelConfig("D"), NgramConfig()), disable_by_batch_size=4)


def test_known_keys_without_effect_warn_once_by_the_users_names_and_null_is_not_given() -> None:
    config = parse_speculative_config(
        {"method": "ngram", "enforce_eager": True, "shared_storage_path": "x", "quantization": None, "speculative_num_steps": 2}
    )
    assert config == SpeculativeConfig((NgramConfig(),), warnings=config.warnings)
    assert config.warnings == (
        "speculative config: no effect with method 'ngram', ignored: enforce_eager, shared_storage_path, speculative_num_steps",
    )
    assert "confidence_threshold" in parse_speculative_config({"method": "dflash", "model": "M", "confidence_threshold": 0.5}).warnings[0]
    of_vllm = {"method": "xpress", "model": "M", "xpress_topc": 512, "xpress_num_passes": 6}
    assert "xpress_num_passes, xpress_topc" in parse_speculative_config(of_vllm).warnings[0]


@pytest.mark.parametrize("text", ['{"method": "off"}', "method: off", "{method: 'off'}"])
def test_off_in_json_and_in_yaml_where_it_is_a_boolean(text: str) -> None:
    assert read_speculative_config(text) == SpeculativeConfig(off=True)


def test_folders_of_scripts(tmp_path: Path) -> None:
    for key, more in {"model": {"method": "eagle3"}, "directory": {"method": "extract_hidden_states"}}.items():
        assert parse_speculative_config({key: tmp_path, **more}) == parse_speculative_config({key: str(tmp_path), **more})


def test_reading_text_and_files(tmp_path: Path) -> None:
    expected = SpeculativeConfig((NgramConfig(3, 4, 4),))
    (tmp_path / "config.yaml").write_text("method: ngram\nnum_speculative_tokens: 3\nprompt_lookup_max: 4\n")
    assert read_speculative_config(f"@{tmp_path}/config.yaml") == expected
    assert read_speculative_config((tmp_path / "config.yaml").read_text()) == expected
    assert read_speculative_config('[{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":4}]') == expected
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("missing.yaml", "binary", "null\0byte"):
        with pytest.raises(SpeculativeConfigError, match="cannot read"):
            read_speculative_config(f"@{tmp_path}/{name}")
    with pytest.raises(SpeculativeConfigError, match='not \'ngram\': write {"method": "ngram"}'):
        read_speculative_config("ngram", "target")
    for text in ("{method: [", "[" * 5000):
        with pytest.raises(SpeculativeConfigError, match="neither JSON nor YAML"):
            read_speculative_config(text)
