"""The product's promise on the embedded model: what is said does not depend on whether and how it was guessed.

Greedy and seeded outputs with speculation off, n-gram, draft model, n-gram cache and prediction are compared token by token, alone and
in a batch of 16, with every sampling parameter. The native executor computes the same bits in any batch: there the outputs are equal
in bfloat16, with int8 weights and with an int8 cache, without exception. In torch batches round differently, so a first difference
is allowed where the target itself was undecided: where the gap between its choice and another is below 1e-4.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from variants import slow_but

from foretoken import LLM, SamplingParams
from foretoken.engine.default_speculation import DEMO_CACHE, DEMO_DRAFT
from foretoken.engine.logit_edits import Node
from foretoken.engine.request import Request
from foretoken.engine.sampler import Sampler
from foretoken.kernels import native, noise

NEAR_TIE = 1e-4
NUM_TOKENS = 40
METHODS = ["ngram", "draft_model"]
NATIVE_METHODS = [*METHODS, "ngram_cache"]  # which torch verifies as it does any other chain (test_every_proposer.py)

PROMPTS = [
    "Write a Python function that adds two numbers.",
    "How do I list the files of a folder?",
    "Tom has 3 apples and buys 4 more. How many apples does he have?",
    "Once upon a time there was a princess who",
    "def fibonacci(n):",
    '{"name": "Spain", "capital": "Madrid", "name": "France", "capital":',
    "Hello! How are you today?",
    "one two three one two three one two",
    "What is the capital of France?",
    "import os\nimport sys\n\ndef main():",
    "Explain what a hash table is.",
    "The quick brown fox jumps over the lazy dog. The quick brown",
    "List three colours.",
    "for i in range(10):\n    print(i)\nfor i in range(10):",
    "Translate to French: good morning",
    "What do you like to do on weekends?",
]

PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0},
    "cool top_k": {"temperature": 0.7, "top_k": 20},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "min_p": {"temperature": 1.2, "min_p": 0.05},
    "all filters": {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
    "repetition": {"temperature": 0, "repetition_penalty": 1.3},
    "frequency and presence": {"temperature": 0.8, "frequency_penalty": 0.6, "presence_penalty": 0.4},
    "logit_bias": {"temperature": 0, "logit_bias": {300: 4.0, 13: -100.0}},
    "bad_words": {"temperature": 0.5, "bad_words": ["the", "is a"]},
    "allowed_token_ids": {"temperature": 1.0, "allowed_token_ids": list(range(50, 400))},
    "min_tokens": {"temperature": 1.0, "min_tokens": 30},
    "ignore_eos": {"temperature": 1.0, "ignore_eos": True},
    "stop": {"temperature": 0, "stop": [".", "\n\n"]},
    "stop_token_ids": {"temperature": 0, "stop_token_ids": [300, 301, 302, 303]},
    "logprobs": {"temperature": 1.0, "logprobs": 3},
}


NATIVE = native.availability().isa is not None
NETWORKS: dict[str, dict[str, Any]] = {"torch": {"executor": "torch", "dtype": "float32"}}
if NATIVE:
    NETWORKS["bfloat16"] = {"executor": "native", "dtype": "bfloat16"}
    NETWORKS["int8"] = {"executor": "native", "dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"}
ALWAYS = ["greedy", "seeded", "all filters", "logprobs"]  # of the parameters, with every network
QUICK = [name for name in NETWORKS if name != "torch"] or ["torch"]  # networks for the others: they all share one sampler


@pytest.fixture(scope="module", params=NETWORKS)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    configured = [
        {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 4, "adaptive": False},
        {"method": "draft_model", "model": str(DEMO_DRAFT), "num_speculative_tokens": 4},
        {"method": "ngram_cache", "model": str(DEMO_CACHE), "num_speculative_tokens": 4},
    ]
    with LLM(speculative_config=configured, kv_cache_gb=0.5, enable_prefix_caching=False, **NETWORKS[request.param]) as made:
        yield made


def methods(llm: LLM) -> list[str]:
    return NATIVE_METHODS if llm._running().model.executor.is_batch_invariant else METHODS


def prompts(llm: LLM) -> list[dict[str, list[int]]]:
    tokenizer = llm.get_tokenizer()
    return [{"prompt_token_ids": tokenizer.encode(text)} for text in PROMPTS]


def params(settings: dict[str, Any], method: str, index: int) -> SamplingParams:
    return SamplingParams(**{"max_tokens": NUM_TOKENS, "seed": 1000 + index, **settings, "speculation": {"method": method}})


def outputs(llm: LLM, settings: dict[str, Any], method: str) -> list[Any]:
    each = [params(settings, method, i) for i in range(len(PROMPTS))]
    return llm.generate(prompts(llm), each, use_tqdm=False)


@pytest.fixture(scope="module")
def plain(llm: LLM) -> Callable[[str], list[Any]]:
    """What each of the parameters gives without speculation: asked once."""
    return cache(lambda name: outputs(llm, PARAMETERS[name], "off"))


def gap(llm: LLM, prompt: list[int], known: list[int], settings: SamplingParams) -> float:
    """How far the target's choice after prompt + known is from another one, in nats."""
    engine = llm._running()
    asked = Request("gap", prompt, replace(settings, logprobs=0), 0.0, NUM_TOKENS, settings.seed or 0, token_ids=[*prompt, *known])
    asked.eos_token_ids = engine.model.eos_token_ids
    from foretoken.engine.plan import PlanRow, StepPlan
    from foretoken.engine.runner import batch_lists

    kv = engine.model.executor.allocate(64, 16)
    row = PlanRow(asked, 0, len(asked.token_ids), [], [], [], range(64), samples=True)
    logits = engine.core.runner.executor.run(batch_lists(StepPlan([row], 16), lambda r: True).batch(), kv).logits
    assert logits is not None
    node = Node(asked, [])
    if settings.greedy:
        asked.params = replace(settings, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
        best = Sampler().distribution(logits, [node]).log().topk(2).values[0]
        return float(best[0] - best[1])
    probs = Sampler().distribution(logits, [node])
    return float(noise.margin(probs.log().float(), noise.keys([noise.stream(asked.seed, 0)], [node.position]))[0])


def assert_same(llm: LLM, plain: list[Any], other: list[Any], settings: dict[str, Any], what: str) -> None:
    for index, (a, b) in enumerate(zip(plain, other, strict=True)):
        one, two = list(a.outputs[0].token_ids), list(b.outputs[0].token_ids)
        if one == two:
            assert a.outputs[0].text == b.outputs[0].text and a.outputs[0].finish_reason == b.outputs[0].finish_reason
            continue
        first = next((i for i, (x, y) in enumerate(zip(one, two, strict=False)) if x != y), min(len(one), len(two)))
        exact = llm._running().model.executor.is_batch_invariant
        assert not exact, f"{what}, prompt {index}: differs at token {first}"
        distance = gap(llm, list(a.prompt_token_ids), one[:first], params(settings, "off", index))
        assert distance < NEAR_TIE, f"{what}, prompt {index}: differs at token {first}, where the target was {distance:.2g} apart"


def check_against_no_draft(llm: LLM, plain: list[Any], name: str) -> None:
    settings = PARAMETERS[name]
    for method in methods(llm):
        other = outputs(llm, settings, method)
        assert_same(llm, plain, other, settings, f"{name}, {method}")
        if "logprobs" in settings:
            for a, b in zip(plain, other, strict=True):
                if a.outputs[0].token_ids == b.outputs[0].token_ids:
                    mine = torch.tensor([a.outputs[0].cumulative_logprob, b.outputs[0].cumulative_logprob])
                    assert torch.allclose(mine[:1], mine[1:], atol=1e-3)


@pytest.mark.parametrize("name", ALWAYS)
def test_output_does_not_depend_on_the_draft(llm: LLM, plain: Callable[[str], list[Any]], name: str) -> None:
    check_against_no_draft(llm, plain(name), name)


@pytest.mark.parametrize("llm", slow_but(QUICK, NETWORKS), indirect=True)
@pytest.mark.parametrize("name", [name for name in PARAMETERS if name not in ALWAYS])
def test_nor_does_it_with_any_other_parameter(llm: LLM, plain: Callable[[str], list[Any]], name: str) -> None:
    check_against_no_draft(llm, plain(name), name)


@pytest.mark.parametrize("name", ["greedy", "all filters"])
def test_output_does_not_depend_on_the_batch(llm: LLM, plain: Callable[[str], list[Any]], name: str) -> None:
    settings, together = PARAMETERS[name], plain(name)
    for method in ["off", *methods(llm)]:
        alone = [
            llm.generate(prompt, params(settings, method, i), use_tqdm=False)[0] for i, prompt in enumerate(prompts(llm)[:6])
        ]
        assert_same(llm, together[:6], alone, settings, f"{name}, {method}, alone")


@pytest.mark.parametrize("name", ["greedy", "seeded"])
@pytest.mark.parametrize("quality", ["right", "half right", "wrong"])
def test_output_does_not_depend_on_a_prediction(llm: LLM, plain: Callable[[str], list[Any]], name: str, quality: str) -> None:
    settings, without = PARAMETERS[name], plain(name)
    each: list[SamplingParams] = []
    for i, output in enumerate(without):
        said = list(output.outputs[0].token_ids)
        predicted = {"right": said, "half right": [*said[:10], 400, *said[10:]], "wrong": [400, 401, 402, 403]}[quality]
        each.append(replace(params(settings, "auto", i), prediction=predicted))
    other = llm.generate(prompts(llm), each, use_tqdm=False)
    assert_same(llm, without, other, settings, f"{name}, prediction {quality}")
    drafted = sum(o.metrics.speculative_decoding.num_draft_tokens for o in other)
    accepted = sum(o.metrics.speculative_decoding.num_accepted_draft_tokens for o in other)
    assert drafted > 0
    if quality == "right":
        assert accepted > 0.8 * sum(len(o.outputs[0].token_ids) for o in without) * 0.8


def test_speculation_really_happened(llm: LLM) -> None:
    for method in methods(llm):
        metrics = [o.metrics.speculative_decoding for o in outputs(llm, PARAMETERS["greedy"], method)]
        assert sum(m.num_draft_tokens for m in metrics) > 100, method
        assert sum(m.num_accepted_draft_tokens for m in metrics) > 10, method


def test_choices_of_one_request_differ_and_are_reproducible(llm: LLM) -> None:
    def texts(method: str) -> list[list[int]]:
        asked = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=20, speculation={"method": method})
        return [list(o.token_ids) for o in llm.generate(prompts(llm)[0], asked, use_tqdm=False)[0].outputs]

    plain = texts("off")
    assert len({tuple(t) for t in plain}) > 1
    assert plain == texts("draft_model")


@pytest.mark.skipif(not NATIVE, reason="the native executor computes the same bits in any batch")
def test_the_default_says_the_same_in_steps_and_in_rounds() -> None:
    """Draft model, prompt lookup and n-gram cache, whoever pays at the moment."""
    with LLM(kv_cache_gb=0.5, **NETWORKS["bfloat16"]) as llm:
        assert llm._running().proposer_names == ("prediction", "draft_model", "ngram", "ngram_cache")
        for name in ("greedy", "seeded"):
            plain, together = outputs(llm, PARAMETERS[name], "off"), outputs(llm, PARAMETERS[name], "auto")
            assert_same(llm, plain, together, PARAMETERS[name], f"{name}, default")
            alone = [llm.generate(prompt, params(PARAMETERS[name], "auto", i), use_tqdm=False)[0] for i, prompt in enumerate(prompts(llm))]
            assert_same(llm, plain, alone, PARAMETERS[name], f"{name}, default, alone")
        assert llm.stats().num_accepted_tokens > 100


def test_crossing_the_threshold_in_mid_stream_changes_no_text() -> None:
    """Three long requests speculate, seven short ones push the batch above the threshold, then drafters catch up."""
    from foretoken.engine.boot import boot
    from foretoken.engine.config import CacheConfig, EngineConfig
    from foretoken.proposers.config import DraftModelConfig, SpeculativeConfig

    speculative = SpeculativeConfig((DraftModelConfig(str(DEMO_DRAFT), 3),), adaptive=False, disable_by_batch_size=4)
    engine = boot(EngineConfig(cache=CacheConfig(num_blocks=400), speculative=speculative))

    def long_ones(method: str) -> list[Request]:
        ids = engine.tokenizer.encode(PROMPTS[3])
        each = [SamplingParams(temperature=0.8, seed=i, max_tokens=60, ignore_eos=True, speculation={"method": method}) for i in range(3)]
        return [engine.intake.requests(f"{method}{i}", ids, p, 0.0)[0] for i, p in enumerate(each)]

    def run(method: str, with_crowd: bool) -> tuple[dict[str, list[int]], list[str | None], list[int]]:
        core, said = engine.core, dict[str, list[int]]()
        reasons: list[str | None] = []
        drafted: list[int] = []
        for request in long_ones(method):
            core.add_request(request)
        step = 0
        while core.has_work:
            if step == 6 and with_crowd:
                crowd = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
                for i in range(7):
                    core.add_request(engine.intake.requests(f"crowd{i}", [5, 6, 7 + i], crowd, 1.0)[0])
            before = core.controller.counts.sums.draft_tokens
            core.interrupt()  # a step in rounds ends after its first one, or the crowd would come too late
            for delta in core.step(float(step)):
                said.setdefault(delta.request_id.removeprefix(method), []).extend(delta.token_ids)
            core.check()
            reasons.append(core.stats().speculation_off)
            drafted.append(core.controller.counts.sums.draft_tokens - before)
            step += 1
        return {k: v for k, v in said.items() if not k.startswith("crowd")}, reasons, drafted

    plain, _, _ = run("off", with_crowd=False)
    text, reasons, drafted = run("auto", with_crowd=True)
    assert text == plain
    off = [i for i, reason in enumerate(reasons) if reason == "batch size"]
    assert off and off[0] == 6, "speculation must be off from the first crowded step"
    assert sum(drafted[:6]) > 0 and sum(drafted[i] for i in off) == 0 and sum(drafted[off[-1] + 1 :]) > 0
    assert engine.core.stats().steps_with_speculation_off["batch size"] == len(off)
