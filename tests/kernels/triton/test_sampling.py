"""The fused choice against the sampler in torch, for the same requests and drafts."""

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from probing_kernels import farthest
from triton_interpreter import DEVICE
from verifying import a_row

from foretoken.engine.plan import PlanRow
from foretoken.engine.request import Request, SamplingParams
from foretoken.engine.sampler import Sampler, _Nodes
from foretoken.kernels.triton.sample_rows import sample
from foretoken.kernels.triton.sampling import Places, choose

numbers = itertools.count()


def a_request(rng: random.Random, vocab_size: int, *, bad: Any = (), **params: Any) -> Request:
    prompt = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 300))]
    request = Request(
        f"r{next(numbers)}", prompt, SamplingParams(**params), 0.0, 100, rng.randrange(1 << 62), frozenset({0}), bad_word_ids=bad
    )
    request.token_ids.extend(rng.randrange(vocab_size) for _ in range(rng.randrange(9)))
    return request


def a_draft(rng: random.Random, vocab_size: int, num_nodes: int) -> tuple[list[int], list[int]]:
    return [rng.randrange(vocab_size) for _ in range(num_nodes)], [rng.randint(-1, i - 1) for i in range(num_nodes)]


def on_the_gpu(logits: torch.Tensor, rows: list[PlanRow]) -> list[int]:
    """What the sampler does where the logits are on a GPU."""
    nodes = _Nodes.of(rows, _firsts(rows))
    sampler = Sampler()  # owns what the places point to
    places, _kept = sampler._described(rows, nodes, logits.shape[1])
    return sample(logits.to(DEVICE), np.array(nodes.logits_rows), places).tolist()


def by_levels(logits: torch.Tensor, rows: list[PlanRow]) -> list[int]:
    return [token for tokens in Sampler(native=False).choose(logits, rows, _firsts(rows)) for token in tokens]


def _firsts(rows: list[PlanRow]) -> list[int]:
    return [0, *itertools.accumulate(1 + len(row.draft_token_ids) for row in rows)][:-1]


FILTERS: list[dict[str, Any]] = [
    {}, {"temperature": 0.0}, {"temperature": 0.3}, {"top_k": 1}, {"top_k": 7}, {"top_k": 200}, {"top_p": 0.1}, {"top_p": 0.9},
    {"top_p": 0.9999}, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.8, "min_p": 0.02}, {"top_k": 300, "top_p": 0.95, "temperature": 1.7},
    {"temperature": 1e-30, "top_k": 3},
]


@pytest.mark.parametrize(("kind", "vocab_size"), [("peaked", 1), ("masked", 24), ("flat", 128), ("tied", 300), ("peaked", 5000)])
def test_filters(kind: str, vocab_size: int):
    rng, generator = random.Random(vocab_size), torch.Generator().manual_seed(vocab_size)
    rows = [a_row(a_request(rng, vocab_size, **filters)) for filters in FILTERS]
    logits = torch.randn(len(rows), vocab_size, generator=generator)
    match kind:
        case "peaked":
            logits *= 4
        case "tied":
            logits = logits.round()
        case "masked":
            logits[:, 1::3] = -math.inf
        case _:
            pass
    before = logits.clone()
    assert on_the_gpu(logits, rows) == by_levels(logits, rows)
    assert torch.equal(logits, before)


EDITS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.7, "temperature": 0.0},
    {"presence_penalty": -1.5, "repetition_penalty": 0.8, "frequency_penalty": 0.4, "top_p": 0.9},
    {"logit_bias": {3: 4.0, 17: -100.0, 20: 3.5}},
    {"allowed_token_ids": [2, 5, 11, 23], "presence_penalty": 1.0},
    {"min_tokens": 9, "stop_token_ids": [1, 2]},
    {"bad": [[4], [5], [7, 8]], "temperature": 0.0},
    {"bad": [[2], [5]], "allowed_token_ids": [2, 5]},  # rather a bad word than nothing
    {},
]


@pytest.mark.parametrize("vocab_size", [24, 2500])
def test_edits(vocab_size: int):
    rng, generator = random.Random(vocab_size), torch.Generator().manual_seed(vocab_size)
    rows = [a_row(a_request(rng, vocab_size, **edits), a_draft(rng, vocab_size, 3)) for edits in EDITS]
    logits = 3 * torch.randn(4 * len(rows), vocab_size, generator=generator)
    assert on_the_gpu(logits, rows) == by_levels(logits, rows)


def test_rows_that_are_not_finite():
    rng = random.Random(0)
    rows = [a_row(a_request(rng, 300, **filters)) for filters in [{}, {"temperature": 0.0}, {"top_k": 5}] for _ in range(4)]
    logits = torch.randn(len(rows), 300)
    logits[0::4, 250] = math.nan
    logits[1::4, 7] = math.inf
    logits[2::4] = -math.inf
    tokens = on_the_gpu(logits, rows)
    assert tokens == by_levels(logits, rows)
    assert [token == -1 for token in tokens] == [True, True, True, False] * 3


@pytest.mark.parametrize("candidates", [0, 12])
@pytest.mark.parametrize("spread", [0.2, 2.5, 5.0])
@pytest.mark.parametrize("wanted", [0.1, 0.8, 0.95, 0.9999999])
def test_top_p_looks_into_few_blocks_where_few_tokens_stand_out(candidates: int, spread: float, wanted: float):
    """None is left out that has one of the tokens that are left."""
    vocab_size, generator = 128 * 128, torch.Generator().manual_seed(0)
    logits = spread * torch.randn(vocab_size, generator=generator)
    logits[torch.randint(vocab_size, (candidates,), generator=generator)] = logits.max() + torch.linspace(8, 0, candidates)
    distances = logits.max() - logits
    weights = torch.exp(-distances.double())
    peaks, masses = distances.view(-1, 128).amin(1), weights.view(-1, 128).sum(1).float()
    whole, top_p = weights.sum().view(1), torch.tensor([wanted], dtype=torch.float64)
    out = torch.empty(1, device=DEVICE)
    given = (peaks.to(DEVICE), masses.to(DEVICE), out, top_p.to(DEVICE), whole.to(DEVICE))
    farthest[(1,)](*given, vocab_size, 128, 128, 128)  # type: ignore[arg-type]
    ordered = distances.sort().values
    last = ordered[(torch.exp(-ordered.double()).cumsum(0) < wanted * whole).sum()]
    assert last <= out.item()
    if candidates and spread == 2.5 and wanted < 0.99:
        assert (peaks <= out.item()).sum() <= candidates


@pytest.mark.parametrize("length", [1, 8, 9, 64])
def test_paths_of_any_length(length: int):
    """Each is padded to one of the lengths that kernels are built for."""
    rng = random.Random(length)
    request = a_request(rng, 40, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.3)
    row = a_row(request, ([rng.randrange(40) for _ in range(length)], list(range(-1, length - 1))))
    logits = 3 * torch.randn(1 + length, 40, generator=torch.Generator().manual_seed(0))
    assert on_the_gpu(logits, [row]) == by_levels(logits, [row])


def test_no_places():
    places = Places(*[torch.zeros(0, device=DEVICE)] * 6)
    assert len(choose(torch.zeros(0, 8, device=DEVICE), places)) == 0
