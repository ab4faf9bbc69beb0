from __future__ import annotations

import dataclasses
import re
from typing import Any

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
        ("logprobs", [-2, 2**31, 1.0, True]),
        ("seed", [0.5, 2**63, "1"]),
        ("temperature", [-0.1, float("nan"), "1", True]),
        ("top_p", [0, 1.1, float("nan")]),
        ("min_p", [-0.1, 1.1]),
        ("repetition_penalty", [0, float("inf")]),
        ("frequency_penalty", [-2.1, 2.1]),
        ("presence_penalty", [-2.1, 2.1]),
        ("logit_bias", [{1: 101}, {1: float("nan")}, {1: "much"}, dict.fromkeys(range(1025), 0)]),
        ("stop", ["", ["a", ""], ["x" * 257], ["a"] * 17, [5]]),
        ("bad_words", [["a"] * 1025]),
        ("allowed_token_ids", [[]]),
        ("speculation", [{"k": 1}]),
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


@pytest.mark.parametrize("value", ["off", 5, ["off"]])
def test_speculation_is_an_object(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="must be an object such as {'method': 'off'}, not " + re.escape(repr(value))):
        SamplingParams(speculation=value)


def test_a_seed_of_minus_one_is_none() -> None:
    assert SamplingParams(seed=-1) == SamplingParams() and SamplingParams(seed=-2).seed == -2


def test_none_is_each_ones_own_nothing() -> None:
    one, other = (SamplingParams(logit_bias=None) for _ in range(2))  # pyright: ignore[reportArgumentType]
    assert one.logit_bias == {} and one.logit_bias is not other.logit_bias


def test_one_string_is_a_list_of_one() -> None:
    params = SamplingParams(stop="END", bad_words="never")
    assert (params.stop, params.bad_words) == (("END",), ("never",))


def test_min_tokens_stay_below_max_tokens() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens 9 is above max_tokens 8"):
        SamplingParams(max_tokens=8, min_tokens=9)
    assert SamplingParams(max_tokens=None, min_tokens=9).min_tokens == 9


def test_parameters_survive_replace() -> None:
    params = SamplingParams(stop=["a"], speculation={"method": "off", "num_speculative_tokens": 3, "corpus_id": "mine"})
    assert dataclasses.replace(params, temperature=0.5).speculation_settings == Speculation("off", 3, "mine")


def test_none_is_nothing_as_in_scripts_for_vllm() -> None:
    settings: Any = {"stop": None, "stop_token_ids": None, "bad_words": None, "logit_bias": None}
    assert SamplingParams(**settings) == SamplingParams()
