"""Acceptance rules in the verifier: p/q rules over many steps with the drafters' own noise, and the lossy rules."""

import random
from collections import Counter
from typing import Any, Literal

import numpy as np
import pytest
import torch
from verifying import Guess, a_request, a_row, chain, chi_square, forward, hash_model, log, verify

from foretoken.engine.logit_edits import Node
from foretoken.engine.lossy import typical_path
from foretoken.engine.plan import PlanRow, StepPlan
from foretoken.engine.request import Request, SamplingParams
from foretoken.engine.sampler import Sampler
from foretoken.engine.verifier import Verifier
from foretoken.kernels import noise
from foretoken.kernels.noise import Purpose
from foretoken.proposers.base import DraftRow, Draw
from foretoken.proposers.config import Typical
from foretoken.proposers.drafting import Feed
from foretoken.proposers.guessing import Drawing, pick

P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
DRAWING = Drawing(3, samples=True, return_probs=True)
STEP_LENGTH, TEXT_LENGTH = 3, 5


def least_p_value(method: Literal["standard", "block"], num_texts: int) -> float:
    """Texts of independent tokens ~ P, drafted from Q step by step; how well the worst two neighbours in them fit."""
    texts = [Request(f"{seed}", [1, 2], SamplingParams(), 0.0, 100, seed) for seed in range(num_texts)]
    verifier = Verifier(method)
    while running := [text for text in texts if text.num_output_tokens < TEXT_LENGTH]:
        feeds = [
            Feed(i, DraftRow(t.request_id, t.token_ids, 2, 0, STEP_LENGTH, 0, [], (), Draw(1.0, t.seed, t.choice)), 0, 1, STEP_LENGTH)
            for i, t in enumerate(running)
        ]
        drawn = pick(feeds, torch.from_numpy(log(Q)).expand(len(feeds) * STEP_LENGTH, -1), DRAWING, None)
        rows = [a_row(text, chain(*guess)) for text, guess in zip(running, drawn.token_ids, strict=True)]
        verdicts = verifier.verify(StepPlan(rows, 16, drawn.probs), forward(rows, lambda prefix: log(P))).rows
        for text, verdict in zip(running, verdicts, strict=True):
            text.token_ids.extend(verdict.token_ids)
    pairs = {(a, b): float(P[a] * P[b]) for a in range(3) for b in range(3)}
    outputs = [text.token_ids[2:] for text in texts]
    return min(chi_square(Counter((o[i], o[i + 1]) for o in outputs), pairs) for i in range(TEXT_LENGTH - 1))


@pytest.mark.parametrize("method", ["standard", "block"])
def test_a_step_knows_nothing_of_the_guesses_before(method: Literal["standard", "block"]) -> None:
    assert least_p_value(method, 6000) > 1e-3


def test_guesses_under_the_noise_of_rejected_ones_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a block leaves of itself tells of the guesses behind: drawn again under the same noise they are no longer ~ Q."""
    monkeypatch.setattr(Drawing, "stream", lambda self, row: noise.stream(row.draw.seed, row.draw.choice, Purpose.DRAFT))
    assert least_p_value("block", 6000) < 1e-5


# Lossy rules

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.5, "frequency_penalty": 1.2, "repetition_penalty": 1.4},
    {"temperature": 1.0, "bad": [[3], [4, 5]], "logit_bias": {7: 2.0}},
]


def plausible_tree(dice: random.Random, request: Request) -> Guess:
    """Up to 12 nodes, tokens from the five best behind each node."""
    tokens: list[int] = []
    parents: list[int] = []
    prefixes = [tuple(request.token_ids)]
    for i in range(dice.randint(1, 12)):
        parents.append(dice.randint(-1, i - 1))
        before = prefixes[parents[-1] + 1]
        tokens.append(int(dice.choice(np.argsort(-hash_model(before))[:5].tolist())))
        prefixes.append((*before, tokens[-1]))
    return tokens, parents


def plain(row: PlanRow, tokens: list[int]) -> int:
    """What the request's target says behind these tokens, without a draft."""
    request = row.request
    grown = Request(
        request.request_id, request.prompt_token_ids, request.params, 0.0, 100, request.seed, request.eos_token_ids,
        token_ids=[*request.token_ids, *tokens], bad_word_ids=request.bad_word_ids,
    )
    (token,) = verify([a_row(grown)])[0].token_ids
    return token


def tree_rows(seed: int) -> list[PlanRow]:
    dice = random.Random(seed)
    requests = [a_request(f"{i}", seed=100 * seed + i, prompt=[seed % 9, i], **settings) for i, settings in enumerate(SETTINGS * 2)]
    return [a_row(request, plausible_tree(dice, request)) for request in requests]


@pytest.mark.parametrize("seed", range(6))
def test_typical_acceptance_judges_by_the_requests_own_distribution(seed: int) -> None:
    rule, rows = Typical(0.2, 0.5), tree_rows(seed)
    verdicts, matched = verify(rows, typical=rule), verify(rows)
    for row, verdict, exact in zip(rows, verdicts, matched, strict=True):
        if row.request.params.greedy:
            assert verdict == exact
            continue
        paths: list[list[int]] = [[]]
        for token, parent in zip(row.draft_token_ids, row.parents, strict=True):
            paths.append([*paths[parent + 1], token])
        prefixes = [(*row.request.token_ids, *path) for path in paths]
        p = torch.cat([
            Sampler().distribution(torch.from_numpy(hash_model(prefix))[None], [Node(row.request, path)])
            for prefix, path in zip(prefixes, paths, strict=True)
        ])
        accepted = typical_path(p, row.draft_token_ids, row.parents, rule)
        said = [row.draft_token_ids[i] for i in accepted]
        assert (verdict.accepted, verdict.token_ids) == (accepted, [*said, plain(row, said)])


def test_typical_acceptance_keeps_more_than_matching() -> None:
    rows = [row for seed in range(10) for row in tree_rows(seed) if not row.request.params.greedy]
    kept = [sum(len(v.accepted) for v in verify(rows, typical=rule)) for rule in (None, Typical(0.05, 0.1))]
    assert kept[1] > kept[0] > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_synthetic_acceptance_has_the_given_rates(temperature: float) -> None:
    rates, num_rows, depth = (0.8, 0.5, 0.9), 4000, 5
    rows = [a_row(a_request(f"{seed}", seed=seed, temperature=temperature), chain(*range(3, 3 + depth))) for seed in range(num_rows)]
    target = forward(rows[:20], hash_model)
    verifier = Verifier(synthetic_rates=rates)
    verdicts = [
        verdict
        for start in range(0, num_rows, 20)  # the same texts, other seeds
        for verdict in verifier.verify(StepPlan(rows[start : start + 20], 16), target).rows
    ]
    expected, reached = {}, 1.0
    for length in range(depth + 1):
        rate = rates[min(length, 2)] if length < depth else 0.0
        expected[length] = reached * (1.0 - rate)
        reached *= rate
    assert chi_square(Counter(len(v.accepted) for v in verdicts), expected) > 1e-4
    for row, verdict in list(zip(rows, verdicts, strict=True))[:40]:
        said = row.draft_token_ids[: len(verdict.accepted)]
        assert verdict.accepted == list(range(len(said))) and verdict.token_ids == [*said, plain(row, said)]


def test_synthetic_acceptance_is_reproducible_and_leaves_plain_rows_alone() -> None:
    rows = tree_rows(3)
    rows += [a_row(row.request) for row in rows[:3]]
    whole = verify(rows, synthetic_rates=(0.7,))
    assert whole == [verify([row], synthetic_rates=(0.7,))[0] for row in rows]
    for row, verdict in zip(rows, whole, strict=True):
        said = [row.draft_token_ids[i] for i in verdict.accepted]
        assert verdict.token_ids == [*said, plain(row, said)]
    assert {len(verdict.accepted) for verdict in whole} >= {0, 1, 2}
