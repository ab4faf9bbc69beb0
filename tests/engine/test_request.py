import dataclasses
from typing import Any

import numpy as np
import pytest

from foretoken.engine.errors import InvalidRequest
from foretoken.engine.request import SamplingParams, Speculation


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", [0, 16_385, 1.5, True, "2"]),
        ("top_k", [-2, 2.5, 2**31]),
        ("max_tokens", [-1, 1.5]),
        ("min_tokens", [-1, 1.5]),
        ("logprobs", [-2, 2**31, 1.0, -1.0, True, np.array([1, 2])]),
        ("seed", [0.5, 2**63, "1"]),
        ("temperature", [-0.1, float("nan"), "1", True]),
        ("top_p", [0, 1.1, float("nan")]),
        ("min_p", [-0.1, 1.1]),
        ("repetition_penalty", [0, float("inf")]),
        ("frequency_penalty", [-2.1, 2.1]),
        ("presence_penalty", [-2.1, 2.1]),
        ("logit_bias", [{1: 101}, {1: float("nan")}, {1: "much"}, dict.fromkeys(range(1025), 0), [1]]),
        ("stop", ["", ["a", ""], ["x" * 257], ["a"] * 17, [5], 5]),
        ("stop_token_ids", [5, {5: 1}]),
        ("bad_words", [["a"] * 1025, 5, b"a"]),
        ("allowed_token_ids", [[], 5]),
        ("speculation", [{"k": 1}, "off", 5, ["off"]]),
        ("speculation.method", [5]),
        ("speculation.corpus_id", [5, "", "a.b", "../a", "x" * 65, "a\n"]),
    ],
)
def test_values_out_of_range_name_their_field(field: str, values: list[Any]) -> None:
    for value in values:
        name, _, key = field.partition(".")
        settings: Any = {name: {key: value} if key else value}
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**settings)
        assert (caught.value.param or "").startswith(field), value


def test_a_seed_of_minus_one_is_none() -> None:
    assert SamplingParams(seed=-1) == SamplingParams() and SamplingParams(seed=-2).seed == -2


def test_none_is_each_ones_own_nothing() -> None:
    """As in scripts for vLLM."""
    settings: dict[str, Any] = {"stop": None, "stop_token_ids": None, "bad_words": None, "logit_bias": None}
    one, other = SamplingParams(**settings), SamplingParams(**settings)
    assert one == SamplingParams() and one.logit_bias == {} and one.logit_bias is not other.logit_bias


def test_one_string_is_a_list_of_one() -> None:
    params = SamplingParams(stop="END", bad_words="never")
    assert (params.stop, params.bad_words) == (["END"], ["never"])


def test_numbers_of_numpy_are_numbers_and_what_is_read_once_is_kept() -> None:
    counts, shares = np.arange(3, 5), np.array([0.5, 0.25], np.float32)
    settings: dict[str, Any] = {
        "seed": counts[0], "max_tokens": counts[1], "temperature": shares[0], "stop_token_ids": counts, "allowed_token_ids": iter([3, 4]),
        "logit_bias": {counts[0]: shares[1]}, "stop": (word for word in ["a"]),
    }
    theirs = SamplingParams(**settings)
    ours = SamplingParams(
        seed=3, max_tokens=4, temperature=0.5, stop_token_ids=[3, 4], allowed_token_ids=[3, 4], logit_bias={3: 0.25}, stop="a"
    )
    assert theirs.clone() == ours and repr(theirs) == repr(ours)


def test_min_tokens_stay_below_max_tokens() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens 9 is above max_tokens 8"):
        SamplingParams(max_tokens=8, min_tokens=9)
    assert SamplingParams(max_tokens=None, min_tokens=9).min_tokens == 9


def test_parameters_survive_replace() -> None:
    params = SamplingParams(stop=["a"], speculation={"method": "off", "num_speculative_tokens": 3, "corpus_id": "mine"})
    assert dataclasses.replace(params, temperature=0.5).speculation_settings == Speculation("off", 3, "mine")
