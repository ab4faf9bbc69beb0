"""Noise is a pure function of its key, uniform, independent across keys, and draws tokens with their probabilities."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from foretoken.kernels import noise
from foretoken.kernels.noise import BLOCK, Purpose

MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1

KNOWN_STREAM = 3746585686858627171
KNOWN_KEYS = [1571332783609232032, -3826657464634581368, 3067494096895254153, -5939951214365225150]
KNOWN_EXTREME_KEY = 8299849384081359949
KNOWN_UNIFORMS = [0.08518212088434118, 0.7925564831742656, 0.16628918819701466, 0.6779945994463655]
KNOWN_EXPONENTIALS = [2.067265034, 0.168495163, 2.180669546, 0.20809707]
KNOWN_TOKENS = [927, 775, 389, 173]


def random_keys(n: int, seed: int = 0) -> torch.Tensor:
    return noise.keys([noise.stream(seed, 0)] * n, list(range(n)))


def slow_exponential(key: int, column: int) -> float:
    """The definition, one number at a time in plain integers."""
    key &= MASK64
    x = (column * (key >> 32 | 1) + key) & MASK32
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK32
    x ^= x >> 15
    x = x * 0x846CA68B & MASK32
    x ^= x >> 16
    return -math.log1p(-(x + 0.5) / 2**32)


def slow_draw(weights: list[float], key: int) -> int:
    blocks = [weights[i : i + BLOCK] for i in range(0, len(weights), BLOCK)]
    block = max(range(len(blocks)), key=lambda b: sum(blocks[b]) / slow_exponential(key, BLOCK + b))
    within = max(range(len(blocks[block])), key=lambda j: blocks[block][j] / slow_exponential(key, j))
    return block * BLOCK + within


def test_known_answers_never_change() -> None:
    # seeded requests promise the same text tomorrow: changing these numbers breaks that promise
    assert noise.stream(0, 0) == KNOWN_STREAM
    assert [noise.key(42, 1, 7, purpose) for purpose in [*Purpose][:4]] == KNOWN_KEYS  # FILL decides no text
    assert noise.key(-(2**63), 63, 10**6) == KNOWN_EXTREME_KEY
    keys = torch.tensor(KNOWN_KEYS)
    assert noise.uniform(keys).tolist() == pytest.approx(KNOWN_UNIFORMS, rel=1e-15)
    assert noise.exponential(keys[:1], 4)[0].tolist() == pytest.approx(KNOWN_EXPONENTIALS, rel=1e-6)
    logits = torch.arange(1000).float().mul(0.7).sin().mul(4)
    logits = logits.expand(4, -1)
    assert noise.sample(logits, keys).tolist() == noise.draw(torch.softmax(logits, -1), keys).tolist() == KNOWN_TOKENS


def test_keys_of_many_are_the_keys_of_each() -> None:
    cases = [(seed, choice, position) for seed in (0, 1, -1, 2**63 - 1, -(2**63)) for choice in (0, 1, 63) for position in (0, 1, 5000)]
    many = noise.keys([noise.stream(s, c) for s, c, _ in cases], [p for *_, p in cases])
    assert many.tolist() == [noise.key(s, c, p) for s, c, p in cases]
    assert len(set(many.tolist())) == len(cases)


def test_noise_and_draws_follow_their_definition() -> None:
    keys = random_keys(8)
    values = noise.exponential(keys, 300)
    assert values[:, ::7].flatten().tolist() == pytest.approx(
        [slow_exponential(k, j) for k in keys.tolist() for j in range(0, 300, 7)], rel=1e-6
    )
    weights = torch.from_numpy(np.random.default_rng(0).dirichlet(np.full(300, 0.1), size=8)).float()
    assert noise.draw(weights, keys).tolist() == [slow_draw(w, k) for w, k in zip(weights.tolist(), keys.tolist(), strict=True)]


def test_no_batch_changes_a_bit() -> None:
    keys = random_keys(9)
    logits = torch.randn(9, 1111, generator=torch.Generator().manual_seed(0)) * 3
    together = noise.exponential(keys, 1111)
    tokens = noise.sample(logits, keys)
    for rows in ([0], [8, 3], [5, 5, 1, 7, 2]):
        assert torch.equal(noise.exponential(keys[rows], 1111), together[rows])
        assert torch.equal(noise.exponential(keys[rows], 13), together[rows, :13])
        assert torch.equal(noise.sample(logits[rows], keys[rows]), tokens[rows])
        assert torch.equal(noise.uniform(keys[rows]), noise.uniform(keys)[rows])


def test_global_generators_are_untouched() -> None:
    before = torch.get_rng_state()
    noise.sample(torch.zeros(2, 500), random_keys(2))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("vary", ["position", "choice", "seed"])
def test_neighbouring_keys_give_independent_uniform_noise(vary: str) -> None:
    n = 4000
    parts = {name: (range(n) if name == vary else [3] * n) for name in ("position", "choice", "seed")}
    streams = [noise.stream(s, c) for s, c in zip(parts["seed"], parts["choice"], strict=True)]
    keys = noise.keys(streams, list(parts["position"]))
    coins = noise.uniform(keys).numpy()
    columns = noise.exponential(keys, 40).numpy()
    assert stats.kstest(coins, "uniform").pvalue > 1e-4
    for column in (0, 1, 39):
        assert stats.kstest(columns[:, column], "expon").pvalue > 1e-4
    assert stats.kstest(columns[17], "expon").pvalue > 1e-4  # along one key
    # 4000 samples: independent values correlate by some 1 / sqrt(4000) = 0.016
    everything = np.concatenate([columns, coins[:, None]], axis=1)
    across_columns = np.corrcoef(everything.T) - np.eye(41)
    assert np.abs(across_columns).max() < 0.08
    for lag in (1, 2, 16):
        assert abs(np.corrcoef(coins[:-lag], coins[lag:])[0, 1]) < 0.06
        assert np.abs([np.corrcoef(columns[:-lag, j], columns[lag:, j])[0, 1] for j in range(40)]).max() < 0.08


def test_purposes_are_independent() -> None:
    coins = [noise.uniform(noise.keys([noise.stream(5, 0, purpose)] * 4000, list(range(4000)))).numpy() for purpose in Purpose]
    assert np.abs(np.corrcoef(coins) - np.eye(len(coins))).max() < 0.06


@pytest.mark.parametrize("vocab_size", [5, BLOCK, 300])
def test_tokens_are_drawn_with_their_probabilities(vocab_size: int) -> None:
    n = 20_000
    rng = np.random.default_rng(vocab_size)
    probs = rng.dirichlet(np.full(vocab_size, 0.5))
    probs[rng.permutation(vocab_size)[: vocab_size // 3]] = 0.0
    probs /= probs.sum()
    tokens = noise.draw(torch.from_numpy(probs * 7).expand(n, -1), random_keys(n, seed=1))
    counts = np.bincount(tokens.numpy(), minlength=vocab_size)
    assert counts[probs == 0].sum() == 0
    frequent = probs * n >= 10
    observed = np.array([*counts[frequent], counts[~frequent].sum()])
    expected = np.array([*probs[frequent], probs[~frequent].sum()]) * n
    possible = expected > 0
    assert stats.chisquare(observed[possible], expected[possible]).pvalue > 1e-4


def test_a_sampling_drafter_agrees_with_the_target_as_often_as_coupling_promises() -> None:
    n, generator = 4000, torch.Generator().manual_seed(3)
    target = torch.randn(1000, generator=generator) * 3
    draft = target + torch.randn(1000, generator=generator) * 0.5
    p, q = target.softmax(-1), draft.softmax(-1)
    distance = float((p - q).clamp(min=0).sum())
    keys = random_keys(n, seed=2)
    agree = noise.sample(target.expand(n, -1), keys) == noise.sample(draft.expand(n, -1), keys)
    independent = noise.sample(target.expand(n, -1), keys) == noise.sample(draft.expand(n, -1), random_keys(n, seed=9))
    assert float(agree.float().mean()) > (1 - distance) / (1 + distance) > 0.5 > float(independent.float().mean())


def test_margin_tells_how_close_a_choice_was() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(400, 500, generator=generator) * 2
    keys = random_keys(400, seed=3)
    margin = noise.margin(logits, keys)
    tokens = noise.sample(logits, keys)
    wobble = torch.rand(400, 500, generator=generator) * 2 - 1
    assert torch.equal(noise.sample(logits + wobble * 0.49 * margin[:, None], keys), tokens)
    assert not torch.equal(noise.sample(logits + wobble * 20 * margin[:, None], keys), tokens)
