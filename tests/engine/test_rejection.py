"""The p/q rules by exact enumeration: every chain that q can draw, every outcome of the coins with its exact chance."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from foretoken.engine.rejection import acceptance, block, residual, token_level

V, K = 3, 3
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[int, Tensor]]


def models(seed: int, width: int = V, depth: int = K) -> tuple[dict[tuple[int, ...], Tensor], dict[tuple[int, ...], Tensor]]:
    """Conditional distributions of a target and a draft behind every prefix; some entries are exactly 0."""
    generator = torch.Generator().manual_seed(seed)
    p: dict[tuple[int, ...], Tensor] = {}
    q: dict[tuple[int, ...], Tensor] = {}
    for length in range(depth + 1):
        for prefix in itertools.product(range(width), repeat=length):
            for model in (p, q):
                weights = torch.rand(width, generator=generator, dtype=torch.float64)
                weights[weights < 0.15] = 0.0
                weights[0] += 0.01 if weights.sum() == 0 else 0.0
                model[prefix] = weights / weights.sum()
    return p, q


def outcomes(rule: Rule, p: Tensor, q: Tensor, guesses: Tensor) -> list[tuple[float, int, Tensor]]:
    """(chance, length, next token's distribution) over all coins: the rule is asked between all its thresholds."""
    of_guess = guesses[:, None]
    if rule is token_level:
        chances = (p[:-1].gather(1, of_guess)[:, 0] / q.gather(1, of_guess)[:, 0]).clamp(max=1.0)
    else:
        chances = acceptance(p, q, guesses)[1]
    found: list[tuple[float, int, Tensor]] = []
    for passes in itertools.product((True, False), repeat=len(guesses)):
        weight, coins = 1.0, []
        for passed, chance in zip(passes, chances.tolist(), strict=True):
            weight *= chance if passed else 1.0 - chance
            coins.append(chance / 2 if passed else (chance + 1.0) / 2)
        if weight > 0.0:
            length, left = rule(p, q, guesses, torch.tensor(coins, dtype=torch.float64))
            found.append((weight, length, left / left.sum()))
    return found


def emitted(rule: Rule, seed: int) -> tuple[dict[tuple[int, ...], float], float]:
    """Chance of every text of K + 1 tokens, the target going on by itself behind what the rule emits; mean accepted guesses."""
    p_of, q_of = models(seed)
    texts: dict[tuple[int, ...], float] = {}
    accepted = 0.0
    for chain in itertools.product(range(V), repeat=K):
        drawn = 1.0
        for i in range(K):
            drawn *= float(q_of[chain[:i]][chain[i]])
        if drawn == 0.0:
            continue
        p = torch.stack([p_of[chain[:i]] for i in range(K + 1)])
        q = torch.stack([q_of[chain[:i]] for i in range(K)])
        for weight, length, left in outcomes(rule, p, q, torch.tensor(chain)):
            accepted += drawn * weight * length
            for token in range(V):
                start = (*chain[:length], token)
                for rest in itertools.product(range(V), repeat=K + 1 - len(start)):
                    chance, text = drawn * weight * float(left[token]), start
                    for more in rest:
                        chance *= float(p_of[text][more])
                        text = (*text, more)
                    texts[text] = texts.get(text, 0.0) + chance
    return texts, accepted


@pytest.mark.parametrize("rule", [token_level, block])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_emitted_is_distributed_as_the_target(rule: Rule, seed: int) -> None:
    p_of, _ = models(seed)
    texts, _ = emitted(rule, seed)
    for text in itertools.product(range(V), repeat=K + 1):
        chance = 1.0
        for i, token in enumerate(text):
            chance *= float(p_of[text[:i]][token])
        assert texts.get(text, 0.0) == pytest.approx(chance, abs=1e-12)


def test_block_keeps_at_least_as_much_and_sometimes_more() -> None:
    pairs = [(emitted(token_level, seed)[1], emitted(block, seed)[1]) for seed in range(6)]
    assert all(by_block >= by_token - 1e-12 for by_token, by_block in pairs)
    assert any(by_block > by_token + 1e-3 for by_token, by_block in pairs)


@pytest.mark.parametrize("rule", [token_level, block])
def test_no_coin_passes_a_guess_that_the_target_never_says(rule: Rule) -> None:
    p = torch.tensor([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]], dtype=torch.float64)
    q = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    length, left = rule(p, q, torch.tensor([0]), torch.zeros(1, dtype=torch.float64))
    assert length == 0 and left.tolist() == [0.0, 0.5, 0.5]


@pytest.mark.parametrize("rule", [token_level, block])
def test_a_draft_that_is_the_target_is_kept_whole(rule: Rule) -> None:
    p_of, _ = models(1)
    chain = max(itertools.product(range(V), repeat=K), key=lambda c: min(float(p_of[c[:i]][c[i]]) for i in range(K)))
    p = torch.stack([p_of[chain[:i]] for i in range(K + 1)])
    assert rule(p, p[:-1], torch.tensor(chain), torch.full((K,), 1 - 1e-9, dtype=torch.float64))[0] == K


def test_certain_guesses_make_both_rules_one() -> None:
    """One-hot q: there is nothing for the block to win."""
    p_of, _ = models(2)
    for chain in itertools.product(range(V), repeat=K):
        p = torch.stack([p_of[chain[:i]] for i in range(K + 1)])
        q = torch.eye(V, dtype=torch.float64)[list(chain)]
        means = [sum(w * length for w, length, _ in outcomes(rule, p, q, torch.tensor(chain))) for rule in (token_level, block)]
        assert means[0] == pytest.approx(means[1], abs=1e-12)


def test_a_residual_that_rounding_leaves_empty_is_the_target_itself() -> None:
    p = torch.tensor([0.25, 0.75])
    assert torch.equal(residual(p, p + 1e-6), p)


@pytest.mark.parametrize("rule", [token_level, block])
def test_what_is_not_a_number_passes_nothing(rule: Rule) -> None:
    p, q = torch.full((3, V), torch.nan), torch.full((2, V), 1 / V)
    length, weights = rule(p, q, torch.tensor([0, 1]), torch.zeros(2))
    assert length == 0 and not weights.isfinite().all()
