"""What the device says of whole drafts, and what the verifier makes of it, against the verifier's own walk, level by level."""

import random
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from overlapping import StartingHashModel, overlapped_core, simulate_overlapped
from simulation import VOCAB
from torch import Tensor
from triton_interpreter import DEVICE
from verifying import Guess, a_request, a_row, chain, forward, hash_model

from foretoken.engine import sampler as sampler_module
from foretoken.engine.plan import PlanRow, RowVerdict, StepPlan
from foretoken.engine.sampler import Sampler, _Nodes, full_logits_wanted
from foretoken.engine.verifier import Verifier
from foretoken.kernels import matching
from foretoken.kernels.layout import ForwardOutput
from foretoken.kernels.matching import Guesses, emitted
from foretoken.kernels.started import Started
from foretoken.kernels.triton.matching import match, warm_up

PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.7, "frequency_penalty": 0.5},
    {"temperature": 0.2},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 1.0, "repetition_penalty": 1.3, "top_p": 0.95},
    {"temperature": 1.0, "frequency_penalty": 1.5, "presence_penalty": -0.4},
    {"temperature": 2.0, "min_p": 0.1, "bad": [[a, b] for a in range(8) for b in range(8)]},
    {"temperature": 1.0, "min_tokens": 12, "stop_token_ids": [3], "max_tokens": None},
    {"temperature": 1.0, "allowed_token_ids": list(range(9))},
]


def model(prefix: tuple[int, ...]) -> np.ndarray:
    """Scores that bfloat16 holds exactly; the end marker is likely, so that drafts have it in their middle."""
    return torch.from_numpy(hash_model(prefix) + 2 * (np.arange(24) == 0)).bfloat16().float().numpy()


def choose_there(self: Sampler, logits: Tensor, rows: list[PlanRow], first_logits: list[int]) -> Tensor:
    """The sampler's way where logits are on a GPU."""
    return self._choose_on_gpu(logits.to(DEVICE), rows, _Nodes.of(rows, first_logits)).cpu()


def match_there(argmax: Tensor, top: Tensor, chosen: Tensor | None, guesses: Guesses) -> Tensor:
    return match(argmax.to(DEVICE), top.to(DEVICE), None if chosen is None else chosen.to(DEVICE), guesses).cpu()


def asked(rows: list[PlanRow], target: ForwardOutput) -> ForwardOutput:
    """The forward with what the kernels say, and without what then stays on the device. Held to the reference of the walk too."""
    chooses = [full_logits_wanted(row.request) for row in rows]
    guesses = Guesses.of([(row.draft_token_ids, row.parents, own) for row, own in zip(rows, chooses, strict=True)])
    drawing = [row for row, own in zip(rows, chooses, strict=True) if own]
    chosen = None
    if drawing:
        assert target.logits is not None
        starts = [0, *accumulate(1 + len(row.draft_token_ids) for row in drawing)][:-1]
        chosen = choose_there(Sampler(), target.logits.bfloat16(), drawing, starts)
    padded = torch.cat([target.argmax, torch.tensor([5])]), torch.cat([target.top, torch.tensor([1.0])])
    answer = match_there(*padded, chosen, guesses)
    assert list(emitted(answer)) == list(emitted(matching.match(*padded, chosen, guesses)))
    return replace(target, argmax=torch.zeros(0), top=torch.zeros(0), matched=answer)


@pytest.fixture
def by_levels(monkeypatch: pytest.MonkeyPatch) -> Verifier:
    monkeypatch.setattr(sampler_module, "_AT_ONCE", 0)
    verifier = Verifier()
    verifier.sampler = Sampler(native=False)
    return verifier


def a_guess(rng: random.Random, future: list[int], kind: str) -> Guess:
    """Often right, of any length, none at all too; end markers (0) stand in the middle."""
    tokens = [token if rng.random() < 0.8 else rng.randrange(24) for token in future[: rng.choice([0, 1, 2, 3, 5, 8])]]
    if kind == "chains":
        return chain(*tokens)
    parents = [rng.choice([i - 1, i - 1, rng.randrange(-1, i)]) for i in range(len(tokens))]
    return tokens, parents


@pytest.mark.parametrize(
    ("kind", "every"),
    [pytest.param("chains", PARAMS, marks=pytest.mark.slow), ("trees", PARAMS[1::2])],  # many of these trees are chains
    ids=["chains", "trees"],
)
def test_drafts_are_walked_as_the_verifier_walks_them(kind: str, every: list[dict[str, Any]], by_levels: Verifier) -> None:
    """Step for step until every request has said enough; what is right ahead is known from the steps themselves."""
    rng = random.Random(kind)
    there, accepted, ends = Verifier(), 0, 0
    requests = [a_request(f"{i}", seed=i, prompt=[i, 1, i], **params) for i, params in enumerate(every)]
    futures: dict[str, list[int]] = {}
    for request, params in zip(requests, every, strict=True):
        alone = a_request(f"{request.request_id} alone", seed=request.seed, prompt=request.prompt_token_ids, **params)
        for _ in range(15):
            (said,) = by_levels.verify(StepPlan([a_row(alone)], 16), forward([a_row(alone)], model)).rows
            alone.token_ids.extend(said.token_ids)
        futures[request.request_id] = alone.token_ids
    while requests := [request for request in requests if request.num_output_tokens < 7]:
        rows = [a_row(r, a_guess(rng, futures[r.request_id][len(r.token_ids) :], kind)) for r in requests]
        target = forward(rows, model)
        verdicts = there.verify(StepPlan(rows, 16), asked(rows, target)).rows
        assert verdicts == by_levels.verify(StepPlan(rows, 16), target).rows
        for request, verdict in zip(requests, verdicts, strict=True):
            request.token_ids.extend(verdict.token_ids)
            assert futures[request.request_id][: len(request.token_ids)] == request.token_ids
            accepted += len(verdict.accepted)
            ends += 0 in verdict.token_ids[:-1]
    assert accepted > 10 and ends > 0, "the test shows nothing"


@pytest.mark.parametrize("seed", range(6))
def test_what_is_accepted_by_decree(seed: int) -> None:
    """The verifier's own path, with the target's token behind it, whether or not guesses would have matched."""
    rng, verifier = random.Random(seed), Verifier(synthetic_rates=(0.8, 0.5))
    rows: list[PlanRow] = []
    for i in range(6):
        request = a_request(f"{i}", seed=10 * seed + i, prompt=[i, 1, i], temperature=0.0)
        likely = [int(model((i, 1, i)).argmax()), *(rng.randrange(24) for _ in range(7))]
        rows.append(a_row(request, a_guess(rng, likely, rng.choice(["chains", "trees"]))))
    target = forward(rows, model)
    expected = verifier.verify(StepPlan(rows, 16), target).rows
    guesses = Guesses.of([(row.draft_token_ids, row.parents, False) for row in rows], [verifier.decreed(row) for row in rows])
    for walk in (match_there, matching.match):
        matched = replace(target, matched=walk(target.argmax, target.top, None, guesses))
        assert verifier.verify(StepPlan(rows, 16), matched).rows == expected


def test_scores_that_are_not_finite_fail_their_row_alone(by_levels: Verifier) -> None:
    """On the way or off it, of rows that choose and of rows that do not."""
    rows = [a_row(a_request(f"{i}", temperature=i % 2), chain(4, 5, 6)) for i in range(8)]
    target = forward(rows, lambda prefix: 20.0 * torch.eye(24)[4 + len(prefix) - 2].numpy())
    assert target.logits is not None
    for row, node, value in ((2, 1, torch.nan), (3, 1, torch.inf), (4, 3, -torch.inf), (5, 0, torch.nan)):
        target.top[4 * row + node] = value
        if row % 2:
            target.logits[4 * (row // 2) + node] = value
    rows[6].draft_token_ids[0] = rows[7].draft_token_ids[0] = 9  # what stands behind a wrong guess does not matter
    target.top[4 * 6 + 2] = target.top[4 * 7 + 2] = torch.nan
    target.logits[4 * 3 + 2] = torch.nan
    verdicts = Verifier().verify(StepPlan(rows, 16), asked(rows, target)).rows
    assert verdicts == by_levels.verify(StepPlan(rows, 16), target).rows
    assert [verdict.error is None for verdict in verdicts] == [True, True, False, False, False, False, True, True]
    assert verdicts[0] == RowVerdict([0, 1, 2], [4, 5, 6, 7]) and verdicts[6].token_ids == [4]


def test_the_widest_draft_and_none() -> None:
    draft = list(range(64))
    guesses = Guesses.of([(draft, range(-1, 63), False), ([], [], False), (draft, [-1] * 64, True)])
    argmax = torch.tensor([*draft, 7, 3, *[50] * 65])
    answer = match_there(argmax, torch.ones(131), torch.tensor([63, *range(64)]), guesses)
    assert list(emitted(answer)) == [([*draft, 7], list(range(65))), ([3], [0]), ([63, 63], [0, 64])]
    nothing = match_there(torch.zeros(0).long(), torch.zeros(0), None, Guesses.of([]))
    assert list(emitted(nothing)) == []
    warm_up(300, torch.bfloat16, torch.device(DEVICE))


class MatchedThere(Started):
    """A pass whose drafts the kernel walks."""

    def match(self, guesses: Guesses, chosen: Tensor | None) -> Tensor:
        return match_there(self.argmax, self.top, chosen, guesses)


class ThereHashModel(StartingHashModel):
    started_class = MatchedThere


def test_worlds_whose_steps_end_on_the_device_come_out_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampler, "choose_ahead", choose_there)
    runners = simulate_overlapped(range(8), lambda *world: overlapped_core(*world, model=ThereHashModel(VOCAB)))
    assert sum(runner.num_matched for runner in runners) > 50
