"""Every sampling parameter against a slow reference in numpy, one row at a time, under the same noise; in torch and natively."""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from foretoken.engine import sampler as sampler_module
from foretoken.engine.errors import InvalidRequest
from foretoken.engine.logit_edits import Node
from foretoken.engine.logit_filters import best
from foretoken.engine.plan import PlanRow
from foretoken.engine.prompt_logprobs import Scores
from foretoken.engine.request import Request, SamplingParams
from foretoken.engine.sampler import Sampler, full_logits_wanted, logprobs
from foretoken.kernels import noise, sampling

numbers = itertools.count()
Choose = Callable[[torch.Tensor, Sequence[Node]], list[int]]


def in_torch(logits: torch.Tensor, nodes: Sequence[Node]) -> list[int]:
    return Sampler().sample(logits, nodes)


def natively(logits: torch.Tensor, nodes: Sequence[Node]) -> list[int]:
    """Paths become part of the requests: what drafts change is tested with drafts."""
    rows: list[PlanRow] = []
    for node in nodes:
        known = [*node.request.token_ids, *node.path]
        request = replace(node.request, request_id=f"r{next(numbers)}", token_ids=known)
        rows.append(PlanRow(request, len(known) - 1, 1, [], [], [], [], True))
    return [tokens[0] for tokens in Sampler(native=True).choose(logits, rows, range(len(rows)))]


needs_library = pytest.mark.skipif(not sampling.available(), reason="no native library for this machine")
both = pytest.mark.parametrize("choose", [in_torch, pytest.param(natively, marks=needs_library)])


def a_request(
    prompt: Sequence[int] = (1, 2),
    output: Sequence[int] = (),
    *,
    eos: int = 0,
    bad: Sequence[Sequence[int]] = (),
    seed: int = 0,
    **params: Any,
) -> Request:
    request = Request(
        f"r{next(numbers)}", list(prompt), SamplingParams(**params), 0.0, 100, seed, frozenset({eos}), bad_word_ids=bad
    )
    request.token_ids.extend(output)
    return request


def reference(logits: np.ndarray, node: Node) -> np.ndarray:
    """Probabilities [V] of the next token (one 1.0 if greedy), in float64, parameter by parameter."""
    request, p = node.request, node.request.params
    output = [*request.token_ids[request.num_prompt_tokens :], *node.path]
    scores = logits.astype(np.float64)
    if p.allowed_token_ids is not None:
        scores = np.array([s if t in p.allowed_token_ids else -np.inf for t, s in enumerate(scores)])
    allowed = scores.copy()
    for word in request.bad_word_ids:
        *before, last = word
        if len(before) <= len(output) and output[len(output) - len(before) :] == before:
            scores[last] = -np.inf
    if len(output) < p.min_tokens:
        scores[[*request.eos_token_ids, *p.stop_token_ids]] = -np.inf
    if np.isneginf(scores).all():
        scores = allowed
    for token, bias in p.logit_bias.items():
        scores[token] += bias
    for token in {*request.prompt_token_ids, *output}:
        scores[token] = scores[token] / p.repetition_penalty if scores[token] > 0 else scores[token] * p.repetition_penalty
    for token in set(output):
        scores[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty
    if p.temperature == 0:
        return np.eye(len(scores))[scores.argmax()]
    with np.errstate(invalid="ignore"):
        probs = np.exp((scores - scores.max()) / p.temperature)
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")  # equals: lowest id first
    if p.top_k > 0:
        probs[order[p.top_k :]] = 0
        probs /= probs.sum()
    if p.top_p < 1:
        probs[order[1:][np.cumsum(probs[order])[:-1] >= p.top_p]] = 0
        probs /= probs.sum()
    probs[probs < p.min_p * probs.max()] = 0
    return probs / probs.sum()


def random_case(rng: random.Random, vocab_size: int) -> Node:
    def maybe(value: Any, default: Any) -> Any:
        return value if rng.random() < 0.3 else default

    def tokens(n: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(n)]

    output, path = tokens(rng.randrange(8)), tokens(rng.randrange(4))
    recent = [*output, *path]
    bad = [tokens(rng.randint(1, 3)) for _ in range(3)] + [[*recent[-n:], *tokens(1)] for n in (1, 2) if len(recent) >= n]
    min_tokens = maybe(rng.randrange(12), 0)
    request = a_request(
        tokens(rng.randint(1, 8)),
        output,
        eos=rng.randrange(vocab_size),
        bad=maybe(bad, ()),
        seed=rng.randrange(-(2**63), 2**63),
        temperature=rng.choice([0.0, 0.3, 1.0, 1.0, 1.7]),
        top_k=maybe(rng.randint(1, vocab_size + 5), 0),
        top_p=maybe(rng.uniform(0.05, 0.999), 1.0),
        min_p=maybe(rng.uniform(0.0, 0.5), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2), 1.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        logit_bias=maybe({t: rng.uniform(-9, 9) for t in tokens(4)}, {}),
        allowed_token_ids=maybe(tokens(rng.randint(1, 12)), None),
        stop_token_ids=tokens(2),
        min_tokens=min_tokens,
        max_tokens=None,
    )
    return Node(request, path)


def random_logits(rng: random.Random, n: int, vocab_size: int) -> torch.Tensor:
    logits = torch.randn(n, vocab_size, generator=torch.Generator().manual_seed(rng.randrange(2**31))) * 3
    rounded = torch.tensor([rng.random() < 0.3 for _ in range(n)])  # many equal scores
    return torch.where(rounded[:, None], logits.round(), logits)


@both
@pytest.mark.parametrize("vocab_size", [17, 300])
def test_random_parameters_agree_with_the_reference(vocab_size: int, choose: Choose) -> None:
    rng = random.Random(vocab_size)
    nodes = [random_case(rng, vocab_size) for _ in range(400)]
    logits = random_logits(rng, len(nodes), vocab_size)
    before = logits.clone()
    tokens = choose(logits, nodes)
    assert torch.equal(logits, before), "the raw logits are still needed for logprobs"
    close_calls = 0
    for node, row, token in zip(nodes, logits, tokens, strict=True):
        probs = torch.from_numpy(reference(row.numpy(), node))[None]
        key = torch.tensor([noise.key(node.request.seed, node.request.choice, node.position)])
        if float(noise.margin(probs.log(), key)) < 1e-4:
            close_calls += 1
        else:
            assert token == int(noise.draw(probs, key)), (node, node.request.params)
    assert close_calls < 10

    drawn = [i for i, node in enumerate(nodes) if not node.request.params.greedy]
    distribution = Sampler().distribution(logits[drawn], [nodes[i] for i in drawn])
    expected = np.stack([reference(logits[i].numpy(), nodes[i]) for i in drawn])
    np.testing.assert_allclose(distribution.numpy(), expected, atol=2e-5)
    assert ((distribution.numpy() == 0) >= (expected == 0)).all(), "a token that is left out has no chance at all"


@both
def test_no_row_depends_on_the_others(choose: Choose) -> None:
    rng = random.Random(5)
    nodes = [random_case(rng, 300) for _ in range(60)]
    logits = random_logits(rng, len(nodes), 300)
    together = choose(logits, nodes)
    assert [choose(logits[i : i + 1], nodes[i : i + 1])[0] for i in range(len(nodes))] == together
    order = rng.sample(range(len(nodes)), len(nodes))
    assert choose(logits[order], [nodes[i] for i in order]) == [together[i] for i in order]


@needs_library
@pytest.mark.parametrize(("vocab_size", "scale"), [(2000, 0.05), (2000, 2.0), (5001, 1.0), (5001, 6.0), (129, 40.0)])
def test_filters_of_large_vocabularies_are_the_same_natively(vocab_size: int, scale: float) -> None:
    """Flat and peaked rows, cuts among thousands of tokens and at the edges of blocks."""
    rng = random.Random(vocab_size)
    nodes: list[Node] = []
    for _ in range(150):
        top_k = rng.choice([0, 0, 1, 2, 5, 40, 129, 1000, vocab_size - 1])
        top_p = rng.choice([1.0, 0.05, 0.5, 0.9, 0.95, 0.999, 0.999999])
        settings = {"temperature": rng.choice([0.1, 0.8, 1.0, 3.0]), "top_k": top_k, "top_p": top_p, "min_p": rng.choice([0.0, 0.0, 0.02])}
        nodes.append(Node(a_request(seed=rng.randrange(2**62), **settings), []))
    logits = random_logits(rng, len(nodes), vocab_size) * scale
    logits[::7] = logits[::7].round()  # thousands of equals
    logits[::11, ::3] = -math.inf
    before = logits.clone()
    tokens, expected = natively(logits, nodes), in_torch(logits, nodes)
    assert torch.equal(logits, before)
    different = [i for i in range(len(nodes)) if tokens[i] != expected[i]]
    assert len(different) < 4
    for i in different:  # only where rounding decides: the next token inside or outside top_p, or an even race
        request = nodes[i].request
        top_ps = [request.params.top_p * (1 + change) for change in (-1e-6, 0.0, 1e-6)]
        moved = [Node(replace(request, params=replace(request.params, top_p=min(p, 1.0)), request_id=f"{p}"), []) for p in top_ps]
        probs = Sampler().distribution(logits[[i] * 3], moved)
        keys = torch.tensor([noise.key(request.seed, 0, nodes[i].position)] * 3)
        assert tokens[i] in noise.draw(probs, keys).tolist() or float(noise.margin(probs.log(), keys).amin()) < 1e-5, request.params


@pytest.mark.parametrize("how", [pytest.param("native", marks=needs_library), "all nodes at once", "level by level"])
def test_nodes_of_drafts_are_sampled_as_if_their_path_was_committed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "level by level":
        monkeypatch.setattr(sampler_module, "_AT_ONCE", 0)
    rng = random.Random(7)
    sampler = Sampler(native=how == "native")
    reached = 0
    for _ in range(30):
        rows: list[PlanRow] = []
        first_logits: list[int] = []
        num_nodes = 3  # rows of logits that belong to no one
        for _ in range(8):
            request = random_case(rng, 12).request
            parents = [rng.randrange(-1, i) if rng.random() < 0.5 else i - 1 for i in range(rng.randrange(7))]
            rows.append(PlanRow(request, len(request.token_ids) - 1, 1, [rng.randrange(12) for _ in parents], parents, [], [], True))
            first_logits.append(num_nodes)
            num_nodes += 1 + len(parents)
        logits = random_logits(rng, num_nodes, 12)
        # half of the guesses are made right, from the root on
        for row, first in zip(rows, first_logits, strict=True):
            for i, parent in enumerate(row.parents):
                if rng.random() < 0.5:
                    known = as_committed(row, parent + 1)
                    row.draft_token_ids[i] = Sampler().sample(logits[[first + parent + 1]], [known])[0]
        chosen = sampler.choose(logits, rows, first_logits)
        for row, first, tokens in zip(rows, first_logits, chosen, strict=True):
            assert len(tokens) == 1 + len(row.parents)
            on_path = {0}
            for i in range(len(tokens)):
                if i and row.parents[i - 1] + 1 in on_path and tokens[row.parents[i - 1] + 1] == row.draft_token_ids[i - 1]:
                    on_path.add(i)
                if i in on_path:
                    assert [tokens[i]] == Sampler().sample(logits[[first + i]], [as_committed(row, i)]), row
            reached += len(on_path) - 1
    assert reached > 200


def as_committed(row: PlanRow, node: int) -> Node:
    path: list[int] = []
    while node:
        path.insert(0, row.draft_token_ids[node - 1])
        node = row.parents[node - 1] + 1
    known = [*row.request.token_ids, *path]
    return Node(replace(row.request, request_id=f"r{next(numbers)}", token_ids=known), [])


def test_accepted_drafts_count_like_committed_tokens_and_rejected_ones_leave_no_trace() -> None:
    rng = random.Random(6)
    sampler = Sampler()
    request = a_request([3, 3, 4], temperature=0.8, repetition_penalty=1.5, frequency_penalty=0.7, presence_penalty=0.4, seed=9)
    for _ in range(40):
        logits = random_logits(rng, 4, 12)
        paths = [[rng.randrange(12) for _ in range(length)] for length in (0, 1, 3, 40)]
        tokens = sampler.sample(logits, [Node(request, path) for path in paths])
        for row, path, token in zip(logits, paths, tokens, strict=True):
            committed = a_request([3, 3, 4], [*request.token_ids[3:], *path], temperature=0.8, repetition_penalty=1.5,
                                  frequency_penalty=0.7, presence_penalty=0.4, seed=9)
            assert Sampler().sample(row[None], [Node(committed, [])]) == [token]
        if rng.random() < 0.2:
            sampler.forget(request.request_id)  # preempted: everything is derived anew
        request.token_ids.append(tokens[0])


def distribution(logits: Sequence[float], path: Sequence[int] = (), **params: Any) -> list[float]:
    return Sampler().distribution(torch.tensor([logits], dtype=torch.float32), [Node(a_request(**params), path)])[0].tolist()


@both
def test_equal_scores_keep_the_lowest_ids(choose: Choose) -> None:
    assert distribution([0, 5, 5, 5, 5], top_k=2) == [0, 0.5, 0.5, 0, 0]
    assert distribution([5, 5, 5, 5], top_p=0.6) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    assert choose(torch.tensor([[1.0, 7.0, 7.0]]), [Node(a_request(temperature=0.0), [])]) == [1]
    # any of those that are left, and no other: 60 seeds see each of a few; among many equals only the lowest ids
    cases: list[tuple[dict[str, Any], set[int]]] = [
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_p": 0.005}, {0, 1}),
        ({"top_p": 2.5 / 400}, {0, 1, 2}),
        ({"top_k": 200, "top_p": 0.01}, {0, 1}),
        ({"top_k": 300, "top_p": 0.5, "min_p": 1.0, "logit_bias": {399: 1.0}}, {399}),
    ]
    for params, left in cases:
        nodes = [Node(a_request(seed=seed, **params), []) for seed in range(60)]
        assert set(choose(torch.full((60, 400), 3.0), nodes)) == left, params


def test_top_p_looks_past_its_first_candidates() -> None:
    logits = torch.linspace(0.1, 0, 5000)[torch.randperm(5000, generator=torch.Generator().manual_seed(0))]
    node = Node(a_request(top_p=0.9), [])
    probs = Sampler().distribution(logits[None], [node])[0].numpy()
    expected = reference(logits.numpy(), node)
    assert abs(int((probs > 0).sum()) - int((expected > 0).sum())) <= 1  # 4,500 float32 probabilities add up to the border
    np.testing.assert_allclose(probs.sum(), 1)
    assert (probs > 0).sum() > 4000


def test_top_k_alone_keeps_tokens_whose_mass_rounds_to_nothing() -> None:
    assert [probability > 0 for probability in distribution([0, -60, -70, -80], top_k=3)] == [True, True, True, False]


def test_order_of_the_filters() -> None:
    p = [0.5, 0.25, 0.15, 0.1]
    logits = [math.log(x) for x in p]
    # top_p judges what top_k left: 0.5 of 0.75 is not yet 0.7
    assert distribution(logits, top_k=2, top_p=0.7) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert distribution(logits, top_k=2, top_p=0.6) == pytest.approx([1, 0, 0, 0])
    assert distribution(logits, min_p=0.4) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    # temperature comes before all of them
    assert distribution(logits, temperature=0.5, min_p=0.2) == pytest.approx([0.8, 0.2, 0, 0])


def test_min_tokens_counts_the_path() -> None:
    settings: dict[str, Any] = {"min_tokens": 3, "stop_token_ids": [1], "eos": 0, "prompt": [5], "output": [4]}
    assert distribution([0, 0, 0], [2], **settings) == [0, 0, 1]
    assert distribution([0, 0, 0], [2, 2], **settings) == pytest.approx([1 / 3] * 3)
    assert distribution([0, 0, 0], [2], ignore_eos=True, **settings) == [0, 0, 1]


def test_bad_words_look_at_the_output_only() -> None:
    assert distribution([0, 0, 0], bad=[[1]]) == [0.5, 0, 0.5]
    assert distribution([0, 0], prompt=[7], bad=[[7, 1]]) == [0.5, 0.5]
    assert distribution([0, 0], [7], prompt=[7], bad=[[7, 1]]) == [1, 0]
    assert distribution([0, 0], [7], prompt=[7], output=[6], bad=[[6, 7, 1]]) == [1, 0]
    assert distribution([0, 0], [7, 6], prompt=[7], bad=[[7, 1]]) == [0.5, 0.5]


@both
def test_everything_forbidden_falls_back_to_what_is_allowed(choose: Choose) -> None:
    assert distribution([9, 0, 0, 0], allowed_token_ids=[2, 3], bad=[[2], [3]]) == [0, 0, 0.5, 0.5]
    assert distribution([9, 0], allowed_token_ids=[1], eos=1, min_tokens=1) == [0, 1]
    greedy = a_request(temperature=0.0, allowed_token_ids=[1], eos=1, min_tokens=1)
    assert choose(torch.tensor([[9.0, -5.0]]), [Node(greedy, [])]) == [1]


def test_ids_outside_the_vocabulary() -> None:
    assert distribution([0, 0], allowed_token_ids=[1, 99], logit_bias={-1: 5, 50: 5}, bad=[[77], [3, 78]], stop_token_ids=[9]) == [0, 1]
    with pytest.raises(InvalidRequest, match="allowed_token_ids"):
        Sampler().prepare(a_request(allowed_token_ids=[99]), 2)


@both
def test_a_row_that_is_not_finite_says_so_and_harms_no_other(choose: Choose) -> None:
    nan, inf = math.nan, math.inf
    logits = torch.tensor([[0.0, 1, 9], [0, nan, 9], [0, inf, 9], [-inf, -inf, -inf], [0, -inf, 9], [0, 1, 9]])
    cases: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.01},
        {"temperature": 0.01, "top_k": 2, "top_p": 0.9, "min_p": 0.1},
        {"temperature": 0.01, "bad": [[0]], "repetition_penalty": 1.1},
    ]
    for params in cases:
        nodes = [Node(a_request(**params), []) for _ in logits]
        assert choose(logits, nodes) == [2, -1, -1, -1, 2, 2]


@both
@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-5, 0.01])
def test_tiny_temperatures_are_greedy_and_finite(temperature: float, choose: Choose) -> None:
    assert choose(torch.tensor([[-3e4, 2.0, 1.5]]), [Node(a_request(temperature=temperature), [])]) == [1]


def test_a_new_request_under_an_old_id_starts_afresh() -> None:
    sampler = Sampler()
    first, second = a_request(logit_bias={0: 50}), a_request(logit_bias={1: 50})
    second.request_id = first.request_id
    logits = torch.zeros(1, 3)
    assert sampler.sample(logits, [Node(first, [])]) == [0]
    assert sampler.sample(logits, [Node(second, [])]) == [1]


def test_which_rows_need_logits() -> None:
    assert not full_logits_wanted(a_request(temperature=0.0, top_k=3, top_p=0.5, stop_token_ids=[5], seed=3))
    assert not full_logits_wanted(a_request(temperature=0.0, min_tokens=1, output=[5]))
    changes: list[dict[str, Any]] = [
        {"temperature": 0.1}, {"logprobs": 0}, {"logit_bias": {1: 1.0}}, {"allowed_token_ids": [1]}, {"bad": [[1]]}, {"min_tokens": 1},
        {"repetition_penalty": 1.1}, {"frequency_penalty": 0.1}, {"presence_penalty": -0.1},
    ]
    for change in changes:
        assert full_logits_wanted(a_request(**{"temperature": 0.0, **change})), change


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0]])
    expected = logits.double().log_softmax(-1)
    first, second = logprobs(logits, [2, 3], [2, 0])
    assert (first.rank, second.rank) == (3, 1)
    assert first.logprob == pytest.approx(float(expected[0, 2]))
    assert second.logprob == pytest.approx(math.log(0.25)) and second.top == ()
    assert [token for token, _ in first.top] == [1, 3]
    assert [value for _, value in first.top] == pytest.approx([float(expected[0, 1])] * 2)
    assert len(logprobs(logits, [0, 0], [20, 20])[0].top) == 4
    named, counted = logprobs(logits, [0, 0], [(3, 0), 1])
    assert [token for token, _ in named.top] == [3, 0] and len(counted.top) == 1
    assert [value for _, value in named.top] == pytest.approx([float(expected[0, 3]), float(expected[0, 0])])


def test_which_of_equal_tokens_are_told_depends_on_no_other_request() -> None:
    logits = torch.randint(0, 12, (1, 300), generator=torch.Generator().manual_seed(0)).float()
    in_order = logits[0].sort(descending=True, stable=True).indices.tolist()
    for count in (1, 3, 20):
        (alone,) = logprobs(logits, [3], [count])
        assert [token for token, _ in alone.top] == in_order[:count]
        assert alone == logprobs(logits.repeat(2, 1), [3, 3], [count, 20])[0]
        assert Scores.of(logits, [3], count).top_ids[0].tolist() == in_order[:count]


class _Named(TorchDispatchMode):
    """The names of what torch does within."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("count", [0, 1, 3, 64])
def test_the_best_are_put_in_order_only_where_some_are_equal(count: int) -> None:
    dice = torch.Generator().manual_seed(count)
    scores = torch.randn(4, 64, generator=dice)
    for is_tied in (False, True):
        if is_tied:
            scores[2] = (scores[2] * 2).round()
        with _Named() as done:
            values, ids = best(scores, count)
        order = scores.sort(dim=-1, descending=True, stable=True)
        assert values.tolist() == order.values[:, :count].tolist() and ids.tolist() == order.indices[:, :count].tolist()
        assert is_tied or "sort" not in done.names
