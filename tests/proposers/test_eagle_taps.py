from typing import Any

import pytest

from foretoken.proposers.config_entry import SpeculativeConfigError
from foretoken.proposers.eagle_taps import tapped_layers


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (2, 16, 29)),  # of 32 layers: what everybody taps
        ({"eagle_aux_hidden_state_layer_ids": [2, 18, 32]}, (2, 18, 32)),
        ({"eagle_aux_hidden_state_layer_ids": [18, 2, 29]}, (2, 18, 29)),  # the target's layers come in their own order
        ({"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": [1, 4]}, (1, 4)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}, (2, 16, 29)),  # SpecForge writes the default so
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}}, (2, 16, 29)),  # so does Kimi K2.5's, as boundaries
        ({"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}, (2, 16, 29)),  # of outputs: Llama 4's in the layout of speculators
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [20, 26, 32]}}, (20, 26, 32)),  # as gpt-oss's third: the last is no output
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [20, 26, 31]}}, (21, 27, 32)),
        ({"target_layer_ids": [1, 9, 17, 25, 31]}, (2, 10, 18, 26, 32)),
        ({"eagle_aux_hidden_state_layer_ids": [3, 5], "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}, (3, 5)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": None}, "eagle_aux_hidden_state_layer_ids": None}, (2, 16, 29)),
    ],
)
def test_boundaries(config: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert tapped_layers(config, None, 32) == expected


def test_the_user_knows_better() -> None:
    assert tapped_layers({"eagle_aux_hidden_state_layer_ids": [2, 18, 29]}, (1, 2, 3), 32) == (1, 2, 3)
    assert tapped_layers({}, (1, 15, 28), 32) == (1, 15, 28)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}, None), ({"target_layer_ids": [1, 32]}, None),
        ({"eagle_aux_hidden_state_layer_ids": [-1, 18]}, None), ({"eagle_aux_hidden_state_layer_ids": [2, 2, 18]}, None), ({}, (1, 40)),
    ],
)
def test_layers_that_the_target_lacks_are_refused(config: dict[str, Any], wanted: tuple[int, ...] | None) -> None:
    with pytest.raises(SpeculativeConfigError, match="'layers'"):
        tapped_layers(config, wanted, 32)


@pytest.mark.parametrize("value", ["2,3", [], [1.5], [True], 3])
def test_what_is_no_list_of_layers_is_refused(value: Any) -> None:
    with pytest.raises(SpeculativeConfigError, match="must be a list of layers"):
        tapped_layers({"eagle_aux_hidden_state_layer_ids": value}, None, 32)


def test_a_target_of_too_few_layers_needs_to_be_told() -> None:
    with pytest.raises(SpeculativeConfigError, match="config.json names none"):
        tapped_layers({}, None, 4)  # (2, 2, 1)
