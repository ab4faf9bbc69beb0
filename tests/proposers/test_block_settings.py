"""Layer numbers and causality as each publisher writes them down."""

from pathlib import Path
from typing import Any

import pytest

from foretoken.proposers.block_settings import BlockSettings
from foretoken.proposers.config_entry import SpeculativeConfigError

MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 64}

ASSISTANT = {"model_type": "muse_glimmer_assistant", "architectures": ["MuseGlimmerAssistantModel"]}


def settings(config: dict[str, Any]) -> BlockSettings:
    return BlockSettings(Path("drafter"), config)


def z_lab(inner: dict[str, Any], **top: Any) -> BlockSettings:
    return settings({"architectures": ["DFlashDraftModel"], "dflash_config": inner, **top})


def speculators(layers: dict[str, Any], **top: Any) -> BlockSettings:
    return settings({"speculators_model_type": "dflash", "transformer_layer_config": layers, **top})


@pytest.mark.parametrize(
    "config, expected",
    [
        ({"dflash_config": {"target_layer_ids": [1, 9, 17]}}, (2, 10, 18)),
        ({"target_layer_ids": [5, -1]}, (6, 0)),  # DeepSeek: -1 is the embedding
        ({"speculators_model_type": "dflash", "aux_hidden_state_layer_ids": [2, 10, 36]}, (2, 10, 36)),
        ({}, (2, 10, 18, 26, 34)),  # as many as the drafter has layers, evenly spread
    ],
)
def test_layers_read(config: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert settings(config).taps(5, 36) == expected


def test_a_single_layer_reads_the_middle() -> None:
    assert settings({}).taps(1, 36) == (19,)


@pytest.mark.parametrize(
    "config, words",
    [
        ({"target_layer_ids": [1, 36]}, "layers 2, 37"),
        ({"target_layer_ids": [-2, 5]}, "layers -1, 6"),
        ({"target_layer_ids": [3, 3]}, "layers 4, 4"),
        ({"target_layer_ids": []}, "must be a list of layers"),
        ({"target_layer_ids": [True]}, "must be a list of layers"),
        ({"speculators_model_type": "dflash"}, "does not say which layers"),
    ],
)
def test_layers_that_cannot_be_read(config: dict[str, Any], words: str) -> None:
    with pytest.raises(SpeculativeConfigError, match=words):
        settings(config).taps(5, 36)


@pytest.mark.parametrize(
    "config, expected",
    [
        (z_lab({}), (False, False, False)),
        (z_lab({}, **MIXED), (True, False, True)),
        (z_lab({"causal": False}, **MIXED), (False, False, False)),
        (z_lab({"causal": True}), (True, True, True)),
        (z_lab({"causal_head": True}), (True, True, True)),
        (z_lab({"causal": False, "causal_head": True}), (False, False, False)),
        (z_lab({}, is_causal=True, **MIXED), (True, True, True)),
        (z_lab({"use_swa": True, "swa_window_size": 32}), (False, False, False)),
        (speculators({}), (False, False, False)),
        (speculators(MIXED), (True, False, True)),
        (speculators({"num_hidden_layers": 3}, **MIXED), (True, False, True)),
        (speculators(MIXED, sliding_window_non_causal=False), (True, False, True)),
        (speculators(MIXED, sliding_window_non_causal=True), (False, False, False)),
        (settings({**ASSISTANT, **MIXED}), (False, False, False)),
    ],
)
def test_causal_layers(config: BlockSettings, expected: tuple[bool, ...]) -> None:
    assert config.causal(3, is_dspark=False) == expected


def test_a_dspark_of_deepseeks_is_bidirectional() -> None:
    assert z_lab({}, **MIXED).causal(3, is_dspark=True) == (False, False, False)


@pytest.mark.parametrize(
    "config, expected",
    [
        (z_lab({}), (None, None, None)),
        (z_lab({}, sliding_window=64), (None, None, None)),
        (z_lab({}, **MIXED), (64, None, 64)),
        (z_lab({}, use_sliding_window=False, **MIXED), (None, None, None)),
        (z_lab({"use_swa": True, "swa_window_size": 32}), (32, 32, 32)),
        (z_lab({"use_swa": True}, sliding_window=64), (64, 64, 64)),
        (z_lab({"use_swa": True, "swa_window_size": 32}, layer_types=["full_attention"] * 3, sliding_window=32), (32, 32, 32)),
        (z_lab({"use_swa": True, "swa_window_size": 32}, **MIXED), (32, None, 32)),
        (speculators(MIXED), (64, None, 64)),
        (speculators({"num_hidden_layers": 3}, **MIXED), (64, None, 64)),
        (speculators(MIXED, use_sliding_window=False), (None, None, None)),
        (settings({**ASSISTANT, **MIXED}), (65, None, 65)),
    ],
)
def test_windows(config: BlockSettings, expected: tuple[int | None, ...]) -> None:
    assert config.windows(3) == expected


@pytest.mark.parametrize(
    "config, words",
    [
        (z_lab({}, layer_types=["full_attention"]), "must name 3 layers"),
        (z_lab({}, layer_types=["linear_attention"] * 3), "linear_attention are not supported"),
        (z_lab({}, **MIXED | {"sliding_window": 0}), "window of 0"),
    ],
)
def test_layers_of_other_kinds(config: BlockSettings, words: str) -> None:
    with pytest.raises(SpeculativeConfigError, match=words):
        config.windows(3)


@pytest.mark.parametrize(
    "config, expected",
    [
        ({"markov_rank": 0}, "DeepSeek"),
        ({"architectures": ["Qwen3DSparkModel"]}, "DeepSeek"),
        ({"architectures": ["DFlashDraftModel"]}, "z-lab"),
        ({"speculators_model_type": "dspark", "markov_rank": 256}, "speculators"),
        (ASSISTANT, "Meta"),
    ],
)
def test_who_published_it(config: dict[str, Any], expected: str) -> None:
    assert settings(config).layout == expected


@pytest.mark.parametrize(
    "config, has_tensors, expected",
    [
        ({"architectures": ["LiLiCorrDraftModel"]}, False, True),
        ({"dflash_config": {"projector_type": "lilicorr"}}, False, True),
        ({"dflash_config": {"lilicorr_enabled": True}}, False, True),
        ({"dflash_config": {"lilicorr_enabled": False}}, True, False),
        ({"architectures": ["DFlashDraftModel"]}, True, True),
        ({"architectures": ["DFlashDraftModel"]}, False, False),
    ],
)
def test_what_marks_a_lilicorr(config: dict[str, Any], has_tensors: bool, expected: bool) -> None:
    assert settings(config).is_lilicorr(has_tensors) == expected
    assert not settings(config).other_kinds()
