"""Speculation changes speed only: the same tokens under "match", the same distribution under the p/q rule."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from variants import slow_but
from verifying import VOCAB, Guess, Method, Model, a_request, a_row, chain, chi_square, draft_tokens, forward, hash_model, log, verify

from foretoken.engine import sampler as sampler_module
from foretoken.engine.plan import PlanRow, RowVerdict, StepPlan
from foretoken.engine.request import Request, SamplingParams
from foretoken.engine.verifier import Verifier
from foretoken.kernels import noise, sampling
from foretoken.kernels.layout import ForwardOutput
from foretoken.kernels.noise import Purpose


def decode(requests: list[Request], num_tokens: int, guess: Callable[[Request], Guess]) -> int:
    """Run all requests together to num_tokens output tokens each; returns the number of accepted drafts."""
    verifier, accepted = Verifier(), 0
    while running := [request for request in requests if request.num_output_tokens < num_tokens]:
        rows = [a_row(request, guess(request)) for request in running]
        for request, verdict in zip(running, verifier.verify(StepPlan(rows, 16), forward(rows, hash_model)).rows, strict=True):
            assert verdict.error is None and len(verdict.token_ids) == len(verdict.accepted) + 1
            request.token_ids.extend(verdict.token_ids)
            accepted += len(verdict.accepted)
    for request in requests:
        del request.token_ids[request.num_prompt_tokens + num_tokens :]
    return accepted


ALL_PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.7, "frequency_penalty": 0.5},
    {"temperature": 0.0, "bad": [[3], [4, 5], [6, 7, 8]], "min_tokens": 9, "stop_token_ids": [1, 2, 9], "max_tokens": None},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 1.0, "repetition_penalty": 1.3, "top_p": 0.95},
    {"temperature": 1.0, "frequency_penalty": 1.5, "presence_penalty": -0.4},
    {"temperature": 1.0, "presence_penalty": 1.9, "allowed_token_ids": list(range(9))},
    {"temperature": 1.0, "logit_bias": {3: 4.0, 5: -4.0}, "min_tokens": 12, "stop_token_ids": [3], "max_tokens": None},
    {"temperature": 1.0, "bad": [[a, b] for a in range(8) for b in range(8)]},
]


def all_requests() -> list[Request]:
    return [a_request(f"{i}", seed=i, prompt=[i, 1, i], **params) for i, params in enumerate(ALL_PARAMS)]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """Each request on its own, one token a step."""
    requests = all_requests()
    for request in requests:
        decode([request], 24, lambda _: ([], []))
    return [request.token_ids for request in requests]


@pytest.mark.parametrize("how", ["native if there is a library", "all nodes at once", "level by level"])
@pytest.mark.parametrize("kind", ["none", "perfect", "wrong", "mixed chain", "tree", "wild tree"])
def test_output_does_not_depend_on_the_draft(plain: list[list[int]], kind: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how != "native if there is a library":
        monkeypatch.setattr(sampling, "available", lambda: False)
    if how == "level by level":
        monkeypatch.setattr(sampler_module, "_AT_ONCE", 0)
    rng = random.Random(kind)

    def guess(request: Request) -> Guess:
        future = plain[int(request.request_id)][len(request.token_ids) :]
        k = rng.randint(0, 6)
        random_tokens = [rng.randrange(VOCAB) for _ in range(k)]
        match kind:
            case "perfect":
                return chain(*future[:k])
            case "wrong":
                return chain(*((token + 1) % VOCAB for token in future[:k]))
            case "mixed chain":
                return chain(*(rng.choice([a, b]) for a, b in zip(future, random_tokens, strict=False)))
            case "tree" | "wild tree":
                # the right path hidden among random branches, or anything, duplicates included
                parents = [rng.randrange(-1, i) for i in range(k)]
                tokens: list[int] = []
                for i, parent in enumerate(parents):
                    depth, at = 0, parent
                    while at >= 0:
                        depth, at = depth + 1, parents[at]
                    right = kind == "tree" and rng.random() < 0.7 and depth < len(future)
                    tokens.append(future[depth] if right else random_tokens[i])
                return tokens, parents
        return [], []

    requests = all_requests()
    accepted = decode(requests, 24, guess)
    assert [request.token_ids for request in requests] == plain
    if kind == "perfect":
        assert accepted > 100
    if kind in ("none", "wrong"):
        assert accepted == 0


def by_prefix(best: dict[tuple[int, ...], int]) -> Model:
    """A target that is sure of one token for each prefix."""

    def model(prefix: tuple[int, ...]) -> np.ndarray:
        logits = np.zeros(VOCAB, dtype=np.float32)
        logits[best[prefix]] = 50.0
        return logits

    return model


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_known_trees(temperature: float) -> None:
    best = {(1, 2): 7, (1, 2, 7): 8, (1, 2, 7, 8): 9, (1, 2, 5): 3, (1, 2, 7, 4): 3, (1, 2, 5, 8): 1}
    cases: list[tuple[Guess, list[int], list[int]]] = [
        (chain(), [], [7]),
        (chain(5), [], [7]),
        (chain(7), [0], [7, 8]),
        (chain(7, 4), [0], [7, 8]),
        (chain(7, 8), [0, 1], [7, 8, 9]),
        (([5, 7, 8, 4, 8], [-1, -1, 0, 1, 1]), [1, 4], [7, 8, 9]),  # 8 under the rejected 5 does not count
        (([7, 7, 8, 8], [-1, -1, 1, 0]), [0, 3], [7, 8, 9]),  # among equal children the first
        (([7, 7, 8], [-1, -1, 1]), [0], [7, 8]),
    ]
    rows = [a_row(a_request(f"{i}", temperature=temperature), guess) for i, (guess, _, _) in enumerate(cases)]
    verdicts = verify(rows, by_prefix(best))
    assert [(v.accepted, v.token_ids) for v in verdicts] == [(accepted, tokens) for _, accepted, tokens in cases]
    assert all(v.logprobs is None and v.error is None for v in verdicts)


def test_rows_that_do_not_sample_get_nothing_and_shift_nothing() -> None:
    greedy, drawn = a_request("greedy", temperature=0.0), a_request("drawn", prompt=[4, 4])
    alone = [verify([a_row(request, chain(1, 2))])[0] for request in (greedy, drawn)]
    prefill = a_row(a_request("prefill"), samples=False)
    assert verify([prefill, a_row(greedy, chain(1, 2)), prefill, a_row(drawn, chain(1, 2)), prefill]) == [
        RowVerdict([], []), alone[0], RowVerdict([], []), alone[1], RowVerdict([], [])
    ]
    nothing = ForwardOutput(torch.empty(0).long(), torch.empty(0), None)
    assert Verifier().verify(StepPlan([prefill], 16), nothing).rows == [RowVerdict([], [])]


@pytest.mark.parametrize("method", ["match", "standard", "block"])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.5}, {"temperature": 0.5, "repetition_penalty": 1.2}])
def test_scores_that_are_not_finite_fail_their_row_alone(params: dict[str, Any], method: Method) -> None:
    best = {(1, 2): 7, (1, 2, 7): 8, (1, 2, 7, 8): 9}

    def model(prefix: tuple[int, ...]) -> np.ndarray:
        if prefix[0] == 5:
            prefix = (1, *prefix[1:])
            if prefix == (1, 2, 7):
                return np.full(VOCAB, np.nan, dtype=np.float32)
        logits = by_prefix(best)(prefix)
        if len(prefix) == 4:
            logits[8:10] = -math.inf, 50.0  # a model may rule tokens out
        return logits

    rows = [
        a_row(a_request("a", **params), chain(7, 8)),
        a_row(a_request("b", prompt=[5, 2], **params), chain(7, 8)),  # its path leads to NaN
        a_row(a_request("c", prompt=[5, 2], **params), ([7], [-1])),
        a_row(a_request("d", **params), chain(7, 8)),
    ]
    verdicts = verify(rows, model, method)
    for verdict in (verdicts[0], verdicts[3]):
        assert (verdict.token_ids, verdict.error) == ([7, 8, 9], None)
    for verdict in verdicts[1:3]:
        assert verdict.token_ids == [] and verdict.error is not None and "not finite" in verdict.error


def test_scores_off_the_path_do_not_matter() -> None:
    def model(prefix: tuple[int, ...]) -> np.ndarray:
        return by_prefix({(1, 2): 7})(prefix) if len(prefix) == 2 else np.full(VOCAB, np.nan, dtype=np.float32)

    methods: list[Method] = ["match", "standard", "block"]
    for temperature, method in itertools.product((0.0, 1.0), methods):
        (verdict,) = verify([a_row(a_request("a", temperature=temperature), chain(5, 6))], model, method)
        assert (verdict.token_ids, verdict.error) == ([7], None)


def test_parameters_that_cannot_work_fail_their_row_alone() -> None:
    good = a_request("good")
    verdicts = verify([a_row(a_request("bad", allowed_token_ids=[VOCAB + 5]), chain(1)), a_row(good, chain(1))])
    assert verdicts[0].error is not None and "allowed_token_ids" in verdicts[0].error
    assert verdicts[1] == verify([a_row(good, chain(1))])[0]


@pytest.mark.parametrize("method", ["match", "standard", "block"])
def test_logprobs_of_every_emitted_token(method: Method) -> None:
    best = {(1, 2): 7, (1, 2, 7): 8, (1, 2, 7, 8): 9, (1, 2, 7, 3): 1}
    settings: list[dict[str, Any]] = [
        {}, {"temperature": 0.0, "logprobs": 2}, {"logprobs": 0, "repetition_penalty": 1.5}, {"temperature": 0.0},
    ]
    rows = [a_row(a_request(f"{i}", **s), chain(7, 8) if i != 1 else chain(7, 3)) for i, s in enumerate(settings)]
    verdicts = verify(rows, by_prefix(best), method)
    assert verdicts[0].logprobs is None and verdicts[3].logprobs is None
    sure = 50 - math.log(math.exp(50) + VOCAB - 1)
    for verdict, emitted, num_best in ((verdicts[1], [7, 8], 2), (verdicts[2], [7, 8, 9], 0)):
        assert verdict.token_ids == emitted and verdict.logprobs is not None
        assert [entry.logprob for entry in verdict.logprobs] == pytest.approx([sure] * len(emitted), abs=1e-5)
        assert [(entry.rank, len(entry.top)) for entry in verdict.logprobs] == [(1, num_best)] * len(emitted)
        assert num_best == 0 or [entry.top[0][0] for entry in verdict.logprobs] == emitted


# The p/q rule, and distributions

P = np.array([0.30, 0.02, 0.20, 0.05, 0.0, 0.13, 0.25, 0.05])
Q = np.array([0.10, 0.30, 0.20, 0.0, 0.05, 0.05, 0.28, 0.02])


def repeated(n: int, guesses: Sequence[Guess], probs: dict[tuple[int, ...], np.ndarray]) -> tuple[list[PlanRow], ForwardOutput]:
    """n requests that differ in their seeds only; the target's probabilities by drafted prefix."""
    table = {prefix: log(p) for prefix, p in probs.items()}
    params = SamplingParams()
    rows = [a_row(Request(f"{seed}", [1, 2], params, 0.0, 100, seed), guess) for seed, guess in enumerate(guesses)]
    assert len(rows) == n
    return rows, forward(rows, lambda prefix: table[prefix[2:]])


FEW, MANY = 5_000, 20_000  # many see a bias of half the size
DRAFTS: dict[str, Callable[[int], list[int]]] = {
    "drawn from q": lambda n: draft_tokens(n, Q, 2, Purpose.DRAFT),
    "coupled": lambda n: draft_tokens(n, Q, 2, Purpose.TARGET),
    "argmax of q": lambda n: [int(Q.argmax())] * n,
    "best of p": lambda n: [int(P.argmax())] * n,
}


@pytest.mark.parametrize("n", slow_but([FEW], [FEW, MANY]))
@pytest.mark.parametrize(
    ("method", "draft", "true_q"),
    [
        ("match", "drawn from q", False), ("match", "coupled", False), ("match", "best of p", False), ("standard", "drawn from q", True),
        ("standard", "argmax of q", False), ("standard", "best of p", False), ("block", "drawn from q", True),
        ("block", "argmax of q", False),
    ],
)
def test_tokens_are_distributed_as_the_target_says(method: Method, draft: str, true_q: bool, n: int) -> None:
    guesses = DRAFTS[draft](n)
    after = {(x,): np.full(8, 1 / 8) for x in range(8)}
    rows, target = repeated(n, [chain(x) for x in guesses], {(): P, **after})
    draft_probs = torch.from_numpy(Q).float().expand(n, -1) if true_q else None
    verdicts = Verifier(method).verify(StepPlan(rows, 16, draft_probs), target).rows
    assert chi_square(Counter(v.token_ids[0] for v in verdicts), dict(enumerate(P))) > 1e-4
    bonus = Counter(v.token_ids[1] for v in verdicts if v.accepted)
    assert chi_square(bonus, dict.fromkeys(range(8), 1 / 8)) > 1e-4
    accepted = sum(bool(v.accepted) for v in verdicts) / n
    overlap, near = float(np.minimum(P, Q).sum()), 0.015 * (MANY / n) ** 0.5  # four standard deviations
    match draft:
        case "drawn from q":
            rate = float((P * Q).sum()) if method == "match" else overlap
            assert accepted == pytest.approx(rate, abs=near)
        case "coupled":
            assert accepted > overlap / (2 - overlap) - 0.01
        case _:
            assert accepted == pytest.approx(P[guesses[0]], abs=near)


@pytest.mark.parametrize("n", slow_but([FEW], [FEW, MANY]))
@pytest.mark.parametrize("method", ["standard", "block"])
def test_longer_chains_leave_the_target_its_distribution(method: Method, n: int) -> None:
    """Pairs of guesses, the second from another draft; the target goes on by itself where only one token came."""
    first, second = draft_tokens(n, Q, 2, Purpose.DRAFT), draft_tokens(n, Q[::-1].copy(), 3, Purpose.DRAFT)
    after = {(x,): np.roll(P, x) for x in range(8)} | {(x, y): np.full(8, 1 / 8) for x in range(8) for y in range(8)}
    rows, target = repeated(n, [chain(x, y) for x, y in zip(first, second, strict=True)], {(): P, **after})
    draft_probs = torch.from_numpy(np.stack([Q, Q[::-1]])).float().repeat(n, 1)
    verdicts = Verifier(method).verify(StepPlan(rows, 16, draft_probs), target).rows
    said: Counter[tuple[int, int]] = Counter()
    for seed, verdict in enumerate(verdicts):
        one, *more = verdict.token_ids
        own = noise.draw(torch.from_numpy(np.roll(P, one))[None], noise.keys([noise.stream(seed, 1, Purpose.TARGET)], [3]))
        said[one, more[0] if more else int(own)] += 1
    expected = {(x, y): float(P[x] * np.roll(P, x)[y]) for x in range(8) for y in range(8)}
    assert chi_square(said, expected) > 1e-4
    accepted = sum(len(v.accepted) for v in verdicts) / n
    assert accepted > 0.75  # 0.68 for the first, some of the second behind it


def test_the_chi_square_sees_a_biased_rule() -> None:
    # the classic mistake: the draft is the argmax, but judged as if it had been drawn from q
    rows, target = repeated(FEW, [chain(6)] * FEW, {(): P, (6,): P})
    verdicts = Verifier("standard").verify(StepPlan(rows, 16, torch.from_numpy(Q).float().expand(FEW, -1)), target).rows
    assert chi_square(Counter(v.token_ids[0] for v in verdicts), dict(enumerate(P))) < 1e-12


@pytest.mark.parametrize("n", slow_but([FEW], [FEW, MANY]))
def test_whole_verdicts_of_the_standard_rule_against_exact_enumeration(n: int) -> None:
    """Two drafts over three tokens: the joint distribution of everything a verdict says, and of the first two tokens."""
    rng = np.random.default_rng(0)
    prefixes = [x for length in range(3) for x in itertools.product(range(3), repeat=length)]
    p = {x: rng.dirichlet(np.ones(3) * 0.7) for x in prefixes}
    q = {x: rng.dirichlet(np.ones(3) * 0.7) for x in prefixes}

    expected: Counter[tuple[int, ...]] = Counter()  # number accepted, then the tokens
    for x in itertools.product(range(3), repeat=2):
        weight = q[()][x[0]] * q[x[:1]][x[1]]
        for i in range(2):
            before = x[:i]
            accept = min(1.0, p[before][x[i]] / q[before][x[i]])
            residual = np.maximum(p[before] - q[before], 0)
            for y in range(3):
                if accept < 1:
                    expected[(i, *before, y)] += weight * (1 - accept) * residual[y] / residual.sum()
            weight *= accept
        for y in range(3):
            expected[(2, *x, y)] += weight * p[x][y]

    first = draft_tokens(n, q[()], 2, Purpose.DRAFT)
    second_of = {x: draft_tokens(n, q[(x,)], 3, Purpose.DRAFT) for x in range(3)}
    guesses = [(x, second_of[x][seed]) for seed, x in enumerate(first)]
    rows, target = repeated(n, [chain(*guess) for guess in guesses], p)
    q_rows = np.stack([q[before] for guess in guesses for before in ((), guess[:1])])
    verifier = Verifier("standard")
    verdicts = verifier.verify(StepPlan(rows, 16, torch.from_numpy(q_rows).float()), target).rows
    assert chi_square(Counter((len(v.accepted), *v.token_ids) for v in verdicts), dict(expected)) > 1e-4

    # rows with one token so far go on without a draft
    for row, verdict in zip(rows, verdicts, strict=True):
        row.request.token_ids.extend(verdict.token_ids)
    short = [a_row(row.request) for row in rows if row.request.num_output_tokens == 1]
    table = {x: log(probs) for x, probs in p.items()}
    for row, verdict in zip(short, verifier.verify(StepPlan(short, 16), forward(short, lambda x: table[x[2:]])).rows, strict=True):
        row.request.token_ids.extend(verdict.token_ids)
    pairs = Counter(tuple(row.request.token_ids[2:4]) for row in rows)
    assert chi_square(pairs, {(a, b): p[()][a] * p[(a,)][b] for a, b in itertools.product(range(3), repeat=2)}) > 1e-4


@pytest.mark.parametrize("method", ["standard", "block"])
def test_the_rule_finds_its_rows_among_others(method: Method) -> None:
    """draft_probs has a row for every drafted token of the plan, whether its row is judged by it or not."""
    one_hot = torch.eye(VOCAB)
    requests = [a_request(f"{seed}", seed=seed, prompt=[seed % VOCAB, 1], repetition_penalty=1.0 + (seed % 2) * 0.4) for seed in range(40)]
    guesses = [chain(*(int(hash_model((seed % VOCAB, 1)).argmax()), 3, 4)[: 1 + seed % 3]) for seed in range(40)]
    alone = [
        Verifier(method).verify(StepPlan([row], 16, one_hot[row.draft_token_ids]), forward([row], hash_model)).rows[0]
        for row in map(a_row, requests, guesses)
    ]
    rows: list[PlanRow] = []
    for i, row in enumerate(map(a_row, requests, guesses)):
        greedy = a_row(a_request(f"greedy {i}", temperature=0.0), chain(1, 2, 3))
        tree = a_row(a_request(f"tree {i}"), ([1, 2], [-1, -1]))
        rows += [greedy, a_row(a_request("p"), samples=False), row, tree]
    tokens = [token for row in rows for token in row.draft_token_ids]
    together = Verifier(method).verify(StepPlan(rows, 16, one_hot[tokens]), forward(rows, hash_model)).rows
    assert together[2::4] == alone
    assert {len(verdict.accepted) for verdict in alone} >= {0, 1}
    assert together[3::4] == verify(rows[3::4])  # trees: sample and match
    assert together[0::4] == verify(rows[0::4])
    # a one-hot q is what None means
    assert verify(rows, hash_model, method) == together


@pytest.mark.parametrize("method", ["standard", "block"])
def test_certain_and_impossible_drafts(method: Method) -> None:
    sure = np.eye(8)[3]
    rows, target = repeated(200, [chain(3)] * 100 + [chain(4)] * 100, {(): sure, (3,): sure, (4,): sure})
    for draft_probs in (None, torch.full((200, 8), 1 / 8), torch.eye(8)[[3] * 100 + [4] * 100]):
        verdicts = Verifier(method).verify(StepPlan(rows, 16, draft_probs), target).rows
        assert all(v.token_ids == [3, 3] for v in verdicts[:100])
        assert all((v.accepted, v.token_ids) == ([], [3]) for v in verdicts[100:])
