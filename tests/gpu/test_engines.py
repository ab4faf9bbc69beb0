"""Whole engines on a GPU: outputs do not depend on guesses, overlap or graphs, and memory is planned in the open."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from orthrus_targets import orthrus_of
from random_drafters import write
from saying import check_engine, said

from foretoken import LLM, SamplingParams
from foretoken.engine.errors import ConfigError
from foretoken.engine.overlapped_runner import OverlappedRunner
from foretoken.engine.plan import StepPlan
from foretoken.engine.runner import Forward
from foretoken.kernels.graphs import GraphExecutor
from foretoken.proposers.early import EarlyChains
from foretoken.proposers.learned import LearnedProposer

PROMPTS = [[5, 6, 7, 8, 9, 10], [20, 21], [33] * 40, [7, 8, 7, 8, 7, 8, 7], list(range(100, 190))]
NUM_TOKENS = 24
KIND_OF_BLOCKS: dict[str, str] = {"dflash2": "dflash", "dflare": "dflash", "ddtree": "dflash"}
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "lookahead": {},
    "draft_model": {"num_speculative_tokens": 3},
    "gumiho": {},
    "eagle3": {"num_speculative_tokens": 3},
    "mtp": {"num_speculative_tokens": 2},
    "pard": {"num_speculative_tokens": 3},
    "medusa": {"num_speculative_tokens": 2},
    "hydra": {"num_speculative_tokens": 3},
    "redrafter": {"num_speculative_tokens": 3},
    "mlp_speculator": {"num_speculative_tokens": 3},
    "dflash": {},
    "dflash2": {},
    "dflare": {},
    "ddtree": {"eagle_topk": 3, "num_draft_tokens": 6},
    "dspark": {},
    "orthrus": {},
}


@pytest.fixture
def small_cache() -> Iterator[dict[str, Any]]:
    yield {"dtype": "float32", "kv_cache_gb": 0.05, "max_model_len": 256, "max_num_seqs": 8, "enable_prefix_caching": False}
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def say(llm: LLM, method: str = "off", **params: Any) -> list[list[int]]:
    each = [
        SamplingParams(**{"max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": i, "speculation": {"method": method}, **params})
        for i in range(len(PROMPTS))
    ]
    return said(llm, PROMPTS, each)


def agreement(a: list[list[int]], b: list[list[int]]) -> float:
    """Share of rows that say the same to the end."""
    return sum(x == y for x, y in zip(a, b, strict=True)) / len(a)


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.9}], ids=["greedy", "seeded"])
def test_the_gpu_says_what_the_cpu_says(gpu: str, deep_target: Path, small_cache: dict[str, Any], params: dict[str, Any]) -> None:
    """In float32: a row may part from the other at a near tie, most do not."""
    with LLM(deep_target, {"method": "off"}, device="cpu", executor="torch", **small_cache) as cpu:
        expected = say(cpu, **params)
    with LLM(deep_target, {"method": "off"}, device=gpu, **small_cache) as llm:
        engine = llm._running()
        assert isinstance(engine.model.executor, GraphExecutor) and isinstance(engine.core.runner, OverlappedRunner)
        found = say(llm, **params)
        assert engine.model.executor.captured.num_graphs > 0
        if params["temperature"] == 0:
            assert engine.core.runner.num_used > NUM_TOKENS // 2
    assert agreement(found, expected) >= 0.8


@pytest.mark.parametrize("method", METHODS)
def test_output_does_not_depend_on_the_draft(gpu: str, deep_target: Path, small_cache: dict[str, Any], method: str, tmp_path: Path) -> None:
    config: dict[str, Any] = {"method": method, "adaptive": False, **METHODS[method]}
    if method == "orthrus":
        deep_target = orthrus_of(deep_target, tmp_path / method)
    elif method not in ("ngram", "lookahead"):
        config["model"] = str(write({"ddtree": "dflash"}.get(method, method), deep_target, tmp_path / method))
    with LLM(deep_target, config, device=gpu, **small_cache) as llm:
        plain, guessed = say(llm, temperature=0), say(llm, KIND_OF_BLOCKS.get(method, method), temperature=0)
        stats = llm.stats()
        assert stats.num_draft_tokens > 0
        check_engine(llm)
        early = early_chains(llm)
        assert sum(chains.num_used for chains in early) > NUM_TOKENS or not early
        runner = llm._running().core.runner
        assert isinstance(runner, OverlappedRunner) and (runner.num_used > NUM_TOKENS or not early), "the target waited for the host"
        assert early or method not in ("draft_model", "eagle3")
    assert agreement(guessed, plain) >= 0.8


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0.8}], ids=["greedy", "seeded"])
def test_early_guesses_are_those_that_come_late_and_nobody_waits_to_begin_them(
    gpu: str,
    deep_target: Path,
    small_cache: dict[str, Any],
    method: str,
    params: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {"method": method, "model": str(write(method, deep_target, tmp_path / method)), **METHODS[method]}
    config |= {"adaptive": False, "draft_sample_method": "probabilistic"}
    guessed: list[list[list[int]]] = []
    counts: list[tuple[int, int]] = []
    for is_early in (True, False):
        with LLM(deep_target, config, device=gpu, **small_cache) as llm:
            core = llm._running().core
            say(llm, method, **params)  # what is captured on the way is there now
            before = llm.stats()
            for proposer in core.proposers.proposers:
                if isinstance(proposer, LearnedProposer):
                    if not is_early:
                        proposer.early = None
                    monkeypatch.setattr(proposer, "begin", without_waiting(proposer.begin))
            monkeypatch.setattr(core.runner, "begin_next", without_waiting(core.runner.begin_next))
            guessed.append(say(llm, method, **params))
            after = llm.stats()
            assert all(health.num_failures == 0 for health in core.proposers.stats()), "the drafter failed, or waited"
            counts.append(
                (after.num_draft_tokens - before.num_draft_tokens, after.num_accepted_tokens - before.num_accepted_tokens)
            )
    assert agreement(*guessed) >= 0.8
    assert counts[0] == pytest.approx(counts[1], rel=0.1, abs=5)


def early_chains(llm: LLM) -> list[EarlyChains]:
    learned = [p for p in llm._running().core.proposers.proposers if isinstance(p, LearnedProposer)]
    return [proposer.early for proposer in learned if proposer.early is not None]


def without_waiting(work: Callable[..., Any]) -> Callable[..., Any]:
    """Raises where the work would wait for the GPU."""

    def call(*arguments: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return work(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return call


DRAWN: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1}


@pytest.mark.parametrize("params", [{"temperature": 0}, DRAWN], ids=["greedy", "seeded"])
def test_a_step_with_guesses_waits_once(
    gpu: str, deep_target: Path, small_cache: dict[str, Any], params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For what its rows emit, by an event: between its hand-over and its verdict nothing else may wait for the GPU."""
    failed: list[str] = []

    def watched(work: Callable[..., Any], plan: StepPlan | None = None) -> Callable[..., Any]:
        """plan: of the step; None = the work is given it."""

        def call(*arguments: Any) -> Any:
            own: StepPlan = plan or arguments[0]
            torch.cuda.set_sync_debug_mode("error" if any(row.draft_token_ids for row in own.rows) else "default")
            try:
                found = work(*arguments)
            except Exception as error:
                failed.append(repr(error))
                raise
            finally:
                torch.cuda.set_sync_debug_mode("default")
            return replace(found, finish=watched(found.finish, own)) if isinstance(found, Forward) else found

        return call

    with LLM(deep_target, {"method": "ngram", "adaptive": False, **METHODS["ngram"]}, device=gpu, **small_cache) as llm:
        core = llm._running().core
        assert isinstance(core.runner, OverlappedRunner)
        plain = say(llm, **params)
        say(llm, "ngram", **params)  # what is captured on the way is there now
        matched = core.runner.num_matched
        monkeypatch.setattr(core.runner, "start", watched(core.runner.start))
        monkeypatch.setattr(core.verifier, "verify", watched(core.verifier.verify))
        guessed = say(llm, "ngram", **params)
        assert core.runner.num_matched > matched and not failed
    assert agreement(guessed, plain) >= 0.8


def test_batch_invariant_engines_say_exactly_the_same(gpu: str, deep_target: Path, small_cache: dict[str, Any], tmp_path: Path) -> None:
    config = {"method": "draft_model", "model": str(write("draft_model", deep_target, tmp_path / "draft")), "num_speculative_tokens": 3}
    options = {**small_cache, "dtype": "bfloat16", "batch_invariant": True}
    with LLM(deep_target, {**config, "adaptive": False}, device=gpu, **options) as llm:
        plain = say(llm, temperature=0)
        assert say(llm, "draft_model", temperature=0) == plain
        for i, prompt in enumerate(PROMPTS):
            params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, speculation={"method": "off"})
            alone = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0]
            assert list(alone.outputs[0].token_ids) == plain[i]


def test_penalties_grammars_and_logprobs_work_there(gpu: str, deep_target: Path, small_cache: dict[str, Any]) -> None:
    with LLM(deep_target, {"method": "off"}, device=gpu, **small_cache) as llm:
        tokens = say(llm, temperature=0.7, repetition_penalty=1.2, presence_penalty=0.3, logprobs=2)
        assert all(len(row) == NUM_TOKENS for row in tokens)
        allowed = say(llm, temperature=1.0, allowed_token_ids=[50, 51, 52])
        assert {token for row in allowed for token in row} <= {50, 51, 52}


def test_memory_is_planned_in_the_open(gpu: str, deep_target: Path) -> None:
    with LLM(deep_target, {"method": "off"}, device=gpu, dtype="float32", gpu_memory_utilization=0.2, max_model_len=256) as llm:
        engine = llm._running()
        assert any("less" in line and "for a step" in line for line in engine.banner)
        total = torch.cuda.mem_get_info()[1]
        assert engine.core.scheduler.kv.pool.num_blocks * engine.model.executor.kv_block_bytes(16) < 0.2 * total
    with pytest.raises(ConfigError, match=r"GB are left for the KV cache, but one sequence of 256 tokens needs") as refused:
        LLM(deep_target, {"method": "off"}, device=gpu, dtype="float32", gpu_memory_utilization=1e-4, max_model_len=256)
    assert "raise gpu_memory_utilization" in str(refused.value)


def test_what_a_gpu_has_not_is_refused(gpu: str, deep_target: Path) -> None:
    for options, told in (
        ({"quantization": "int8"}, "native executor"),
        ({"executor": "transformers"}, "runs on CPUs only"),
        ({"device": f"cuda:{torch.cuda.device_count()}"}, "GPUs here are"),
    ):
        with pytest.raises(ConfigError, match=told):
            LLM(deep_target, {"method": "off"}, **{"device": gpu, **options})


def test_figures_are_finite(gpu: str, deep_target: Path, small_cache: dict[str, Any]) -> None:
    with LLM(deep_target, {"method": "off"}, device=gpu, **small_cache) as llm:
        say(llm, temperature=0)
        stats = llm.stats()
        assert math.isfinite(stats.step_seconds) and stats.generation_tokens == NUM_TOKENS * len(PROMPTS)
