"""Rows, target scores and statistics for tests of the verifier: what a step would hand it, without an engine."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from scipy import stats

from foretoken.engine.plan import PlanRow, RowVerdict, StepPlan
from foretoken.engine.request import Request, SamplingParams
from foretoken.engine.sampler import full_logits_wanted
from foretoken.engine.verifier import Verifier
from foretoken.kernels import noise
from foretoken.kernels.layout import ForwardOutput
from foretoken.kernels.noise import Purpose

VOCAB = 24
Method = Literal["match", "standard", "block"]
Guess = tuple[list[int], list[int]]  # draft tokens, parents
Model = Callable[[tuple[int, ...]], np.ndarray]  # prefix -> logits [V]


def hash_model(prefix: tuple[int, ...]) -> np.ndarray:
    """A target whose next token depends on every token before."""
    return np.random.default_rng(prefix).standard_normal(VOCAB).astype(np.float32) * 3


def a_request(name: str, *, seed: int = 0, bad: Sequence[Sequence[int]] = (), prompt: Sequence[int] = (1, 2), **params: Any) -> Request:
    return Request(name, list(prompt), SamplingParams(**params), 0.0, 100, seed, frozenset({0}), bad_word_ids=bad)


def a_row(request: Request, guess: Guess = ([], []), samples: bool = True) -> PlanRow:
    known = len(request.token_ids)
    return PlanRow(request, known - 1, 1, guess[0], guess[1], [0] * len(guess[0]), [], samples)


def chain(*tokens: int) -> Guess:
    return list(tokens), list(range(-1, len(tokens) - 1))


def forward(rows: Sequence[PlanRow], model: Model) -> ForwardOutput:
    """What the runner would return: all nodes of sampling rows, whole logits only where they are wanted."""
    logits: list[np.ndarray] = []
    full: list[int] = []
    for row in rows:
        if row.samples:
            prefixes = [tuple(row.request.token_ids)]
            for token, parent in zip(row.draft_token_ids, row.parents, strict=True):
                prefixes.append((*prefixes[parent + 1], token))
            if full_logits_wanted(row.request):
                full += range(len(logits), len(logits) + len(prefixes))
            logits += [model(prefix) for prefix in prefixes]
    everything = torch.from_numpy(np.stack(logits))
    top, argmax = everything.max(-1)
    return ForwardOutput(argmax, top, everything[full] if full else None)


def verify(rows: list[PlanRow], model: Model = hash_model, method: Method = "match", **lossy: Any) -> list[RowVerdict]:
    """What the verifier says of a step of these rows. lossy: its rules that go before the method."""
    return Verifier(method, **lossy).verify(StepPlan(rows, 16), forward(rows, model)).rows


def log(probs: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(probs).astype(np.float32)


def draft_tokens(n: int, probs: np.ndarray, position: int, purpose: Purpose) -> list[int]:
    keys = noise.keys([noise.stream(seed, 0, purpose) for seed in range(n)], [position] * n)
    return noise.draw(torch.from_numpy(probs).expand(n, -1), keys).tolist()


def chi_square(observed: Counter[Any], expected: dict[Any, float]) -> float:
    """p-value; what cannot happen must not have happened."""
    n = observed.total()
    assert all(expected.get(outcome, 0.0) > 1e-12 for outcome in observed), observed
    common = {outcome: p * n for outcome, p in expected.items() if p * n >= 5}
    counts = [observed[outcome] for outcome in common]
    rest, rest_count = n - sum(common.values()), n - sum(counts)
    if rest > 1e-6:
        return float(stats.chisquare([*counts, rest_count], [*common.values(), rest]).pvalue)
    return float(stats.chisquare(counts, list(common.values())).pvalue)
