from __future__ import annotations

import pytest
import torch

from foretoken.proposers.training.evaluate import greedy_answer, greedy_matches, mean_accepted_length, spread
from foretoken.proposers.training.target import Shape


@pytest.mark.parametrize(("matches", "k", "expected"), [
    ([1, 1, 0, 1, 1], 3, 2.5),                         # two kept and one of the target's; then two kept, at the end
    ([0, 0, 0], 3, 1.0),
    ([1, 1, 1, 1, 1, 1, 1, 1], 3, 4.0),
    ([], 3, 0.0),
])
def test_mean_accepted_length(matches: list[bool], k: int, expected: float) -> None:
    assert mean_accepted_length([matches], k) == expected


def test_a_model_agrees_with_itself_and_another_one_does_not() -> None:
    torch.manual_seed(0)
    tiny = Shape(hidden=32, layers=1, heads=2, kv_heads=2, intermediate=64)
    target, other = tiny.build(64), tiny.build(64)
    for model in (target, other):
        model.set_attn_implementation("sdpa")
        for name, weight in model.named_parameters():
            if "layers" in name and weight.dim() == 2:
                weight.data *= 30            # else the tied embedding makes everybody repeat the last token
    prompt = [1, 30, 31]
    matches = greedy_matches(target, target, prompt, new_tokens=8)
    assert len(matches) == len(greedy_answer(target, prompt, 8)) and all(matches)
    assert not all(greedy_matches(target, other, prompt, new_tokens=8))


def test_prompts_are_spread_over_all() -> None:
    prompts = [[number] for number in range(10)]
    assert spread(prompts, 3) == [[0], [3], [6]] and spread(prompts, 50) == prompts
