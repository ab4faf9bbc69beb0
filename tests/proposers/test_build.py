"""The menu: from a config to proposers, in two steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from target_views import a_view

from foretoken.proposers import load, open_all
from foretoken.proposers.config import NgramConfig, PredictionConfig, SpeculativeConfig
from foretoken.proposers.config_entry import SpeculativeConfigError
from foretoken.proposers.config_reading import parse_speculative_config
from foretoken.proposers.loading import LoadedProposer, Opening, Resources
from foretoken.proposers.ngram import NgramProposer


def _unused(*_: Any) -> Any:
    raise AssertionError("methods without weights ask for nothing")


def _resources(find_folder: Callable[[str, str | None], Path] = _unused) -> Resources:
    return Resources(a_view(), find_folder, _unused, _unused)


def _opening(name: str, index: int) -> Opening:
    return Opening(name, [], num_blocks=4, block_size=16, return_probs=False)


def _names(config: SpeculativeConfig) -> tuple[str, ...]:
    return tuple(p.name for p in open_all(load(config, _resources()), _opening))


def test_predictions_come_first_and_without_being_asked_for() -> None:
    assert _names(SpeculativeConfig((NgramConfig(),))) == ("prediction", "ngram")
    assert _names(SpeculativeConfig((NgramConfig(), PredictionConfig(3)))) == ("prediction", "ngram")
    assert _names(SpeculativeConfig()) == ("prediction",)


def test_off_means_nobody() -> None:
    assert _names(parse_speculative_config({"method": "off"})) == ()


def test_a_second_one_of_a_kind_has_a_name_of_its_own() -> None:
    assert _names(SpeculativeConfig((NgramConfig(), NgramConfig(2)))) == ("prediction", "ngram", "ngram_2")


def test_a_name_that_only_begins_alike_is_another_one() -> None:
    parts = [LoadedProposer(name, lambda opening: NgramProposer(NgramConfig(), opening.name)) for name in ("eagle3", "eagle", "eagle")]
    assert [p.name for p in open_all(parts, _opening)] == ["eagle3", "eagle", "eagle_2"]


def test_settings_of_the_prediction_are_kept() -> None:
    (prediction,) = open_all(load(SpeculativeConfig((PredictionConfig(3),)), _resources()), _opening)
    assert prediction.max_tokens == 3


@pytest.mark.parametrize("method", ["eagle", "eagle3", "medusa", "hydra", "mlp_speculator", "dflash", "dspark", "ngram_cache"])
def test_pickles_are_refused_with_a_way_out(method: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 8, "vocab_size": 32}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    config = parse_speculative_config({"method": method, "model": str(tmp_path), "num_speculative_tokens": 2})
    with pytest.raises(SpeculativeConfigError, match=r"pytorch_model\.bin is a pickle.*convert it to safetensors"):
        load(config, _resources(lambda model, revision: Path(model)))
