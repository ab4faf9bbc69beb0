"""Every proposer at once in one engine over the embedded model: what is said is what is said without any of them.

Learned drafters have random weights here, so nearly every guess is rejected: the harder test. Requests of one batch use different
proposers, chains and trees side by side, some none; some bring predictions, some go away in between.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fixed_k import fixed
from ngram_tables import every_token
from ngram_tables import write as write_table
from random_drafters import MAKERS, VARIANTS, write
from saying import said
from variants import slow_but

from foretoken import LLM, SamplingParams
from foretoken.engine.boot import Engine
from foretoken.engine.request import Request
from foretoken.kernels import native

TARGET = Path(__file__).parents[1] / "engine" / "demo_model" / "target"
VOCAB = 8192
NUM_TOKENS = 24
TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
MORE: dict[str, dict[str, Any]] = {
    "draft_model": {"num_speculative_tokens": 4, "draft_sample_method": "probabilistic"},
    "pard": {"num_speculative_tokens": 5, "draft_sample_method": "probabilistic"},
    "pard2": {"num_speculative_tokens": 3},
    "eagle": {"num_speculative_tokens": 3},
    "eagle3": {"num_speculative_tokens": 4, "draft_sample_method": "probabilistic"},
    "gumiho": {"draft_sample_method": "probabilistic"},
    "peagle": {"num_speculative_tokens": 4},
    "mlp_speculator": {"draft_sample_method": "probabilistic"},
    "mtp": {"num_speculative_tokens": 3},
    "uno": {"num_speculative_tokens": 4},
}
TREES: dict[str, dict[str, Any]] = {
    "eagle": {"speculative_token_tree": TREE},
    "eagle3": {"eagle_topk": 3, "num_steps": 3, "num_draft_tokens": 8},
    "medusa": {"speculative_token_tree": TREE},
    "hydra": {"speculative_token_tree": TREE},
    "redrafter": {"speculative_token_tree": TREE},
    "dflash": {"eagle_topk": 3, "num_draft_tokens": 9},
}
PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0},
    "top_p": {"temperature": 0.7, "top_p": 0.9},
    "penalties": {"temperature": 0.8, "frequency_penalty": 0.6, "presence_penalty": 0.4, "repetition_penalty": 1.2},
    "logit_bias": {"temperature": 0, "logit_bias": {300: 4.0, 13: -100.0}},
    "allowed ids": {"temperature": 1.0, "allowed_token_ids": list(range(50, 400))},
}
NATIVE = native.availability().isa is not None
NETWORKS = {"torch": {"executor": "torch", "dtype": "float32"}} | ({"native": {"executor": "native"}} if NATIVE else {})
ALWAYS = ["greedy", "seeded"]  # of the parameters, with both networks; the others need one sampler, and that is the same for both


def configs(folder: Path) -> list[dict[str, Any]]:
    """All of them; a second one of a kind, with a tree, is named method_2."""
    table = write_table(folder / "ngram_cache", every_token(random.Random(0), VOCAB), 1, VOCAB)
    model_free: list[dict[str, Any]] = [
        {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "disable_by_batch_size": 64},
        {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_branches": 3, "shared_pool": True},
        {"method": "suffix"},
        {"method": "suffix", "use_tree": True},
        {"method": "ngram_cache", "model": str(table), "num_speculative_tokens": 4},
        {"method": "lookahead", "max_ngram_size": 4},
    ]
    folders = {method: str(write(method, TARGET, folder / method, seed)) for seed, method in enumerate([*MAKERS, *VARIANTS])}
    learned = [{"model": at, **MORE.get(method, {})} for method, at in folders.items()]
    trees = [{"model": folders[method], "quantization": "none", **tree} for method, tree in TREES.items()]
    return [*model_free, *learned, *trees]


@pytest.fixture(scope="module", params=NETWORKS)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    every = configs(tmp_path_factory.mktemp("drafters"))
    if request.param == "torch":  # narrow weights are native only
        every = [{key: value for key, value in config.items() if key != "quantization"} for config in every]
    with LLM(speculative_config=fixed(every), kv_cache_gb=0.5, **NETWORKS[request.param]) as made:
        yield made


def engine_of(llm: LLM) -> Engine:
    assert llm._engine is not None
    return llm._engine


def prompts(count: int) -> list[dict[str, list[int]]]:
    """Pairs share their beginnings, so that later ones find blocks in the prefix cache."""
    torch.manual_seed(5)
    stems = [torch.randint(40, 4000, (37,)).tolist() for _ in range(4)]
    return [{"prompt_token_ids": stems[i % 4][: 20 + i] + [40 + i] * (i % 3)} for i in range(count)]


def names(llm: LLM) -> list[str]:
    return [name for name in engine_of(llm).proposer_names if name != "prediction"]


def check_against_no_speculation(llm: LLM, what: str) -> None:
    """One batch in which each proposer has a row of its own, and as many rows have none."""
    exact = engine_of(llm).model.executor.is_batch_invariant
    methods = names(llm)
    asked = prompts(len(methods))

    def outputs(of: list[str]) -> list[list[int]]:
        params = [
            SamplingParams(max_tokens=NUM_TOKENS, seed=i, ignore_eos=True, speculation={"method": method}, **PARAMETERS[what])
            for i, method in enumerate(of)
        ]
        return said(llm, asked, params)

    plain = outputs(["off"] * len(methods))
    for shift in (0, 7):  # other proposers for the same texts
        turned = methods[shift:] + methods[:shift]
        for method, expected, got in zip(turned, plain, outputs(turned), strict=True):
            same = sum(a == b for a, b in zip(expected, got, strict=True))
            assert expected == got if exact else same > NUM_TOKENS // 2, f"{method}: {got} instead of {expected}"
    stats = engine_of(llm).core.proposers.stats()
    assert not [(p.name, p.off_reason) for p in stats if p.num_failures], "a proposer failed"


@pytest.mark.parametrize("what", ALWAYS)
def test_outputs_are_those_without_speculation(llm: LLM, what: str) -> None:
    check_against_no_speculation(llm, what)


@pytest.mark.parametrize("llm", slow_but(["native" if NATIVE else "torch"], NETWORKS), indirect=True)
@pytest.mark.parametrize("what", [what for what in PARAMETERS if what not in ALWAYS])
def test_so_they_are_with_any_other_parameter(llm: LLM, what: str) -> None:
    check_against_no_speculation(llm, what)


def test_a_mixed_crowd(llm: LLM) -> None:
    """32 at once: every proposer, some with predictions, some without speculation, some aborted on the way."""
    engine = engine_of(llm)
    methods = ["auto", "off", *names(llm)]
    asked = prompts(32)

    def requests(method_of: Any) -> list[Request]:
        made: list[Request] = []
        for i, prompt in enumerate(asked):
            params = SamplingParams(
                temperature=0.9 * (i % 2), seed=i, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False,
                prediction=[50, 60, 70] * 4 if i % 5 == 0 else None, speculation={"method": method_of(i)},
            )
            made += engine.intake.requests(f"{method_of(i)}-{i}", prompt["prompt_token_ids"], params, 0.0)
        return made

    def run(crowd: list[Request], aborted: set[int]) -> list[list[int]]:
        for request in crowd:
            engine.core.add_request(request)
        step = 0
        while engine.core.has_work:
            engine.core.step(float(step))
            step += 1
            if step == 6:
                for i in aborted:
                    engine.core.abort(crowd[i].request_id)
            if step % 8 == 0:
                engine.core.check()
        return [request.token_ids[request.num_prompt_tokens :] for request in crowd]

    crowd = run(requests(lambda i: methods[i % len(methods)]), {3, 10, 21})
    assert {i for i, said in enumerate(crowd) if len(said) != NUM_TOKENS} <= {3, 10, 21}, "those that were aborted"
    if engine.model.executor.is_batch_invariant:  # else the rest of a batch may change a text
        for i, request in enumerate(requests(lambda i: "off")):
            (alone,) = run([request], set())
            assert crowd[i] == alone[: len(crowd[i])], f"request {i}, {methods[i % len(methods)]}"
    engine.core.check()


def test_every_proposer_has_guessed(llm: LLM) -> None:
    """Runs last: none of the above was true because nobody guessed."""
    drafted = {p.name: p.num_draft_tokens for p in engine_of(llm).core.stats().proposers}
    assert not [name for name in names(llm) if not drafted[name]]
