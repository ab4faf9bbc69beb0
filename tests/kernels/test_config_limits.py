"""Which layers are served, and by what, told from a config alone."""

import pytest
import transformers
from tiny_models import RECURRENT, tiny_config

from foretoken.kernels.config_limits import is_recurrent, refuse_layers
from foretoken.kernels.decoder import supports
from foretoken.kernels.rope import UnsupportedModel


@pytest.mark.parametrize("family", RECURRENT)
def test_recurrent_layers_are_a_programs(family: str) -> None:
    config = tiny_config(family)
    assert supports(config) and is_recurrent(config)
    refuse_layers(config, is_program=True)
    with pytest.raises(UnsupportedModel, match="through transformers: it has layers of type '(linear_attention|conv)'.*use executor auto"):
        refuse_layers(config)


def test_recurrent_layers_of_other_families_are_refused() -> None:
    config = transformers.MiniMaxConfig(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    assert not supports(config)
    with pytest.raises(UnsupportedModel) as told:
        refuse_layers(config)
    assert "a 'minimax' model cannot be served: it has layers of type 'linear_attention'; choose" in str(told.value)
    assert "Qwen3-Next, Qwen3.5, LFM2, Granite 4, Bamba, Falcon-H1 and Nemotron-H" in str(told.value)  # whatever recurrent_families.py has


@pytest.mark.parametrize("younger", ["sliding_windows", "swiglu_limits"])
def test_settings_of_single_layers_that_nobody_reads_are_refused(younger: str) -> None:
    config = tiny_config("exaone_moe", **{younger: [4] * 3})
    assert not supports(config)
    with pytest.raises(UnsupportedModel, match=f"its config.json says {younger}, which transformers .* does not read"):
        refuse_layers(config)


def test_attention_alone_is_anybodys() -> None:
    for config in (tiny_config("llama"), tiny_config("gemma3"), tiny_config("qwen3_5", layer_types=["full_attention"] * 3)):
        assert not is_recurrent(config)
        refuse_layers(config)
