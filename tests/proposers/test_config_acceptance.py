"""Exact, p/q and lossy rules of acceptance, as a speculative config asks for them."""

from typing import Any

import pytest

from foretoken.proposers.config import SpeculativeConfig, Typical
from foretoken.proposers.config_entry import SpeculativeConfigError
from foretoken.proposers.config_reading import parse_speculative_config


def read(**keys: Any) -> SpeculativeConfig:
    return parse_speculative_config({"method": "ngram", **keys})


def synthetic(**keys: Any) -> tuple[float, ...] | None:
    config = read(rejection_sample_method="synthetic", **keys)
    assert config.lossy == "synthetic" and config.rejection_sample_method == "match" and not config.warnings
    return config.synthetic_rates


@pytest.mark.parametrize("rule", ["match", "standard", "block"])
def test_exact_rules(rule: str) -> None:
    config = read(rejection_sample_method=rule, acceptance_method="rejection_sampler")
    assert config.rejection_sample_method == rule and config.lossy is None


@pytest.mark.parametrize("name", ["typical", "typical_acceptance_sampler"])
def test_typical_acceptance_is_lossy_and_has_medusas_defaults(name: str) -> None:
    config = read(acceptance_method=name)
    assert config.typical == Typical(0.09, 0.3) and config.lossy == "typical"
    config = read(acceptance_method=name, typical_acceptance_sampler_posterior_threshold=0.2, posterior_alpha=0.4)
    assert config.typical == Typical(0.2, 0.4) and not config.warnings
    assert "posterior_alpha" in read(posterior_alpha=0.4).warnings[0]


def test_synthetic_rates_are_unconditional_as_in_vllm() -> None:
    assert synthetic(synthetic_acceptance_rates=[0.8, 0.4, 0.1, 0, 0]) == pytest.approx((0.8, 0.5, 0.25, 0, 0))
    assert synthetic(synthetic_acceptance_rates=[0.7]) == (0.7,)
    assert synthetic(synthetic_acceptance_rates=0.7) == (0.7,)
    config = parse_speculative_config({"method": "synthetic", "synthetic_acceptance_rates": [1, 0.5]})
    assert config.synthetic_rates == (1, 0.5)


@pytest.mark.parametrize("length", [1, 1.01, 2.6, 4.999, 6])
def test_a_mean_length_is_met_by_one_rate(length: float) -> None:
    rates = synthetic(synthetic_acceptance_length=length)
    assert rates is not None and len(rates) == 1 and 0 <= rates[0] <= 1
    assert 1 + sum(rates[0] ** i for i in range(1, 6)) == pytest.approx(length, abs=1e-9)


def test_a_mean_length_counts_the_levels_of_a_tree() -> None:
    config = parse_speculative_config(
        {"method": "eagle", "model": "E", "speculative_token_tree": [[0], [1], [2], [0, 0]], "rejection_sample_method": "synthetic",
         "synthetic_acceptance_length": 1.75}
    )
    assert config.synthetic_rates == pytest.approx((0.5,))  # 1 + 0.5 + 0.25


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"rejection_sample_method": "fly"}, "'fly' is lossy and not available"),
        ({"rejection_sample_method": "best"}, "'match' or 'standard' or 'block'"),
        ({"acceptance_method": "typical", "rejection_sample_method": "standard"}, "'standard' are two rules"),
        ({"acceptance_method": "typical", "rejection_sample_method": "block"}, "'block' are two rules"),
        (
            {"acceptance_method": "typical", "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [1]},
            "synthetic acceptance and 'acceptance_method' 'typical'",
        ),
        ({"acceptance_method": "typical", "posterior_threshold": 2}, "'posterior_threshold' must be a number from 0 to 1"),
        ({"synthetic_acceptance_rates": [0.5]}, "needs 'rejection_sample_method': 'synthetic'"),
        ({"synthetic_acceptance_length": 2}, "'synthetic_acceptance_length' makes outputs nonsense"),
        ({"rejection_sample_method": "synthetic"}, "one of 'synthetic_acceptance_rates' and 'synthetic_acceptance_length'"),
        (
            {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [1], "synthetic_acceptance_length": 2},
            "one of 'synthetic_acceptance_rates' and",
        ),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5, 0.6]}, "must not rise"),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [1.5]}, "from 0 to 1"),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": []}, "must be a list of numbers"),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [float("nan")]}, "from 0 to 1"),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 6.1}, "is above 6: 5 guesses and the extra token"),
        (
            {"method": "mtp", "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2},
            "needs 'num_speculative_tokens' beside it",
        ),
        ({"method": "synthetic", "rejection_sample_method": "standard"}, "leave 'rejection_sample_method' 'standard' out"),
        ({"method": "synthetic"}, "synthetic acceptance needs one of"),
    ],
)
def test_mistakes_name_the_key_and_the_remedy(value: dict[str, Any], words: str) -> None:
    with pytest.raises(SpeculativeConfigError) as caught:
        read(**value)
    assert words in str(caught.value)


def test_entries_of_a_list_contradict_each_other() -> None:
    with pytest.raises(SpeculativeConfigError, match="synthetic acceptance and 'rejection_sample_method' 'block'"):
        parse_speculative_config(
            [{"method": "synthetic", "synthetic_acceptance_rates": [1]}, {"method": "ngram", "rejection_sample_method": "block"}]
        )
