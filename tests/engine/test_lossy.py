"""Rules that change what is said: they do exactly what they are described to do."""

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from fixed_k import fixed

from foretoken import LLM, SamplingParams
from foretoken.engine.lossy import decreed_path, typical_path
from foretoken.proposers.config import Typical


def plain_typical(p: torch.Tensor, tokens: list[int], parents: list[int], rule: Typical) -> list[int]:
    """All paths, one by one, from the formula."""
    best: tuple[int, float] = (0, 0.0)
    found: list[int] = []
    for leaf in range(len(tokens)):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        total = 0.0
        for node in path:
            row = p[parents[node] + 1]
            entropy = -sum(float(x) * math.log(float(x)) for x in row if x > 0)
            if float(row[tokens[node]]) <= min(rule.threshold, rule.alpha * math.exp(-entropy)):
                break
            total += math.log(float(row[tokens[node]]))
        else:
            if (len(path), total) > best:
                best, found = (len(path), total), path
    return found


@pytest.mark.parametrize("seed", range(60))
def test_typical_acceptance_takes_the_longest_plausible_path(seed: int) -> None:
    dice = random.Random(seed)
    torch.manual_seed(seed)
    size = dice.randint(1, 12)
    parents = [dice.randint(-1, i - 1) for i in range(size)]
    tokens = [dice.randrange(6) for _ in range(size)]
    p = torch.softmax(torch.randn(size + 1, 6, dtype=torch.float64) * dice.choice([0.5, 2, 5]), -1)
    rule = Typical(dice.choice([0.09, 0.3]), dice.choice([0.3, 0.8]))
    assert typical_path(p, tokens, parents, rule) == plain_typical(p, tokens, parents, rule)


def test_a_certain_target_takes_its_own_token_only() -> None:
    p = torch.tensor([[0.0, 1.0], [0.5, 0.5]], dtype=torch.float64)
    assert typical_path(p, [1], [-1], Typical()) == [0]
    assert typical_path(p, [0], [-1], Typical()) == []


def test_acceptance_by_decree() -> None:
    chain = [-1, 0, 1, 2]
    assert decreed_path(chain, [0.5], [0.4, 0.4, 0.6, 0.0]) == [0, 1]
    assert decreed_path(chain, [0.5, 0.7], [0.4, 0.6, 0.6, 0.6]) == [0, 1, 2, 3]
    assert decreed_path(chain, [0.0], [0.0] * 4) == []
    assert decreed_path([-1, -1, 0, 1], [1.0], [0.9] * 4) == [0, 2]  # the first child of each node


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ({}, None),
        ({"acceptance_method": "typical"}, "typical"),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [1.0, 1.0, 0.0]}, "synthetic"),
    ],
)
def test_outputs_and_statistics_name_a_lossy_rule(tiny_target: Path, entry: dict[str, Any], name: str | None) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, **entry}
    with LLM(str(tiny_target), speculative_config=fixed(config), kv_cache_gb=0.05, allow_synthetic_acceptance=True) as llm:
        params = SamplingParams(max_tokens=30, temperature=1.0, seed=1, ignore_eos=True)
        (output,) = llm.generate({"prompt_token_ids": [50, 51, 52, 53] * 6}, params, use_tqdm=False)
        stats, banner = llm._running().core.stats(), "\n".join(llm._running().banner)
    metrics = output.metrics.speculative_decoding
    assert metrics.lossy == name and (stats.acceptance, stats.is_lossy) == (name or "match", name is not None)
    assert (f"LOSSY: {name}" in banner) == (name is not None)
    if name == "synthetic":
        assert metrics.num_spec_steps > 0 and metrics.acceptance_histogram[3:] == []
        assert metrics.mean_acceptance_length > 2.5  # two of every three guesses; fewer where less was found
