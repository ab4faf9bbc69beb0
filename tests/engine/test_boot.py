"""Whole engines on tiny networks: what was never written or was given back reaches no living row; every seam is connected."""

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from as_on_a_gpu import bind_as_on_a_gpu
from decoding import Decoding
from fake_graphs import FakeRecorder
from native_only import native_only
from random_drafters import write
from tiny_models import save_llama

from foretoken.engine.boot import Engine, assemble, boot
from foretoken.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from foretoken.engine.errors import ConfigError, ContextTooLong
from foretoken.engine.model import load_model
from foretoken.engine.origin import Origin
from foretoken.engine.request import SamplingParams
from foretoken.engine.runner import Runner
from foretoken.engine.sampler import full_logits_wanted
from foretoken.kernels import native
from foretoken.kernels.graphs import GraphExecutor
from foretoken.kernels.layout import FINAL
from foretoken.kernels.torch_kv import TorchKV
from foretoken.proposers import proposer_set
from foretoken.proposers.base import Draft, DraftContext, Feedback, Needs
from foretoken.proposers.config import DraftModelConfig, EagleConfig, HiddenStatesConfig, MedusaConfig, NgramConfig, SpeculativeConfig
from foretoken.proposers.learned import LearnedProposer
from foretoken.proposers.proposer_set import ProposerSet


def start(target: Path, proposers: tuple[Any, ...], executor: str, dtype: str = "float32", blocks: int = 64, **scheduler: int) -> Engine:
    speculative = SpeculativeConfig(proposers, off=not proposers)
    return boot(
        EngineConfig(
            ModelConfig(str(target), dtype=dtype, executor=executor),
            CacheConfig(num_blocks=blocks, block_size=4),
            SchedulerConfig(**({"max_num_batched_tokens": 24, "max_num_seqs": 6} | scheduler)),
            speculative,
        )
    )


OPTIMISED = """
import sys
from foretoken import LLM, SamplingParams
(output,) = LLM(sys.argv[1]).generate("The quick", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
assert False, "this must be no statement here"
print(len(output.outputs[0].token_ids))
"""


def test_nothing_depends_on_what_assertions_do(tmp_path: Path) -> None:
    """python -O, or PYTHONOPTIMIZE in a container, leaves them out; costs are measured, as nothing is kept yet."""
    folder = save_llama(tmp_path / "target", hidden_size=32, num_layers=1, seed=0)
    command = [sys.executable, "-O", "-W", "ignore", "-c", OPTIMISED, str(folder)]
    done = subprocess.run(command, env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)}, capture_output=True, text=True, timeout=120)
    assert done.stdout == "4\n", done.stderr


def _kv_of(proposer: LearnedProposer) -> Any:
    guesser: Any = proposer._guesser
    return guesser.network.kv


def caches(engine: Engine) -> list[TorchKV]:
    found = [engine.core.runner.kv]
    found += [_kv_of(p) for p in engine.core.proposers.proposers if isinstance(p, LearnedProposer)]
    return [kv for kv in found if isinstance(kv, TorchKV)]


def poison(engine: Engine) -> None:
    """NaN into every slot that holds no committed token and no known prefix."""
    kv = engine.core.scheduler.kv
    size = kv.block_size
    live = {b * size + i for b in kv.pool.prefixes for i in range(size)}
    for table in kv.tables.values():
        live |= {table.blocks[p // size] * size + p % size for p in range(table.num_committed)}
    dead = torch.tensor([s for s in range(kv.pool.num_blocks * size) if s not in live], dtype=torch.int64)
    for cache in caches(engine):
        for tensor in (*cache.k, *cache.v):
            tensor[dead] = float("nan")


def run(engine: Engine, jobs: list[tuple[list[int], SamplingParams, int]], arrivals: list[int], poisoned: bool = True) -> dict[str, Any]:
    core, said, step = engine.core, {}, 0
    todo = list(enumerate(jobs))
    if poisoned:
        for cache in caches(engine):
            for tensor in (*cache.k, *cache.v):
                tensor.fill_(float("nan"))
    while todo or core.has_work:
        while todo and arrivals[todo[0][0]] <= step:
            i, (prompt, params, priority) = todo.pop(0)
            for request in engine.intake.requests(f"r{i}", prompt, params, float(step), Origin(priority)):
                core.add_request(request)
        for delta in core.step(float(step)):
            assert delta.finish_reason != "error", delta.error
            said.setdefault(delta.request_id, []).extend(delta.token_ids)
        core.check()
        if poisoned:
            poison(engine)
        step += 1
        assert step < 2000
    return said


class TreeProposer:
    """Trees of n-gram guesses and noise: right often enough that paths are moved."""

    name = "trees"
    needs = Needs()
    max_tokens = 6

    def __init__(self, book: dict[tuple[int, ...], list[int]]) -> None:
        self.book = book
        self.dice = random.Random(3)

    def propose(self, context: DraftContext) -> Draft:
        token_ids: list[int] = []
        parents: list[int] = []
        starts = [0]
        for row in context.rows:
            # the truth hangs off nodes 1, 3, 5; lies between
            truth = self.book.get(tuple(row.token_ids[: row.num_prompt_tokens]), [])[len(row.token_ids) - row.num_prompt_tokens :]
            parent = -1
            for node in range(min(row.ceiling, self.max_tokens)):
                if node % 2 and node // 2 < len(truth):
                    token_ids.append(truth[node // 2])
                    parents.append(parent)
                    parent = node
                else:
                    token_ids.append(self.dice.randrange(300))
                    parents.append(parent)
            starts.append(len(token_ids))
        return Draft(token_ids, starts, parents, [0] * len(token_ids))

    def observe(self, feedback: Feedback) -> None: ...
    def forget(self, request_id: str) -> None: ...
    def check(self) -> None: ...
    def close(self) -> None: ...


def jobs_of(dice: random.Random, n: int = 10) -> list[tuple[list[int], SamplingParams, int]]:
    stem = [dice.randrange(4, 300) for _ in range(30)]
    jobs = []
    for i in range(n):
        prompt = stem[: dice.randint(1, 30)] + [dice.randrange(4, 300) for _ in range(dice.randint(0, 10))]
        params = SamplingParams(
            temperature=dice.choice([0.0, 0.0, 0.8]), seed=i, max_tokens=dice.randint(1, 24), ignore_eos=True,
            n=dice.choice([1, 1, 2]), presence_penalty=dice.choice([0, 0, 0.5]),
            prediction=tuple(stem) if dice.random() < 0.3 else None,
        )
        jobs.append((prompt, params, dice.choice([0, 0, 1, -1])))
    return jobs


@pytest.mark.parametrize("executor", ["torch", "transformers"])
def test_nan_slots_reach_nobody(tiny_target: Path, tiny_draft: Path, executor: str) -> None:
    dice = random.Random(1)
    jobs = jobs_of(dice)
    arrivals = sorted(dice.randint(0, 12) for _ in jobs)
    plain_engine = start(tiny_target, (), executor, blocks=400, max_num_batched_tokens=2048)
    plain = {}
    for i, job in enumerate(jobs):
        alone = run(plain_engine, [job], [0], poisoned=False)
        plain |= {key.replace("r0", f"r{i}", 1): value for key, value in alone.items()}
    for proposers in ((DraftModelConfig(str(tiny_draft), 3),), (DraftModelConfig(str(tiny_target), 4), NgramConfig(3, 2, 1))):
        for blocks in (17, 30, 200):
            engine = start(tiny_target, proposers, executor, blocks=blocks)
            assert run(engine, jobs, arrivals) == plain, (proposers, blocks)
            assert all(p.num_failures == 0 for p in engine.core.proposers.stats())


@pytest.mark.parametrize("executor", ["torch", "transformers"])
def test_trees_beside_a_draft_model(tiny_target: Path, executor: str) -> None:
    dice = random.Random(2)
    jobs = jobs_of(dice, 8)
    arrivals = [0] * len(jobs)
    plain = run(start(tiny_target, (), executor, blocks=400), jobs, arrivals, poisoned=False)
    book = {tuple(p): plain[f"r{i}"] for i, (p, s, _) in enumerate(jobs) if s.n == 1}
    engine = start(tiny_target, (DraftModelConfig(str(tiny_target), 4),), executor, blocks=60)
    first, *others = engine.core.proposers.proposers
    proposers = ProposerSet([first, TreeProposer(book), *others], vocab_size=300)
    core = assemble(engine.config, engine.speculative, engine.model, engine.core.runner, proposers)
    others_own = {"method": "draft_model"}  # every other request is the draft model's
    shared = [(p, replace(s, speculation=others_own) if i % 2 else s, rank) for i, (p, s, rank) in enumerate(jobs)]
    assert run(replace(engine, core=core), shared, arrivals) == plain
    by_name = {t.name: t for t in core.controller.counts.totals}
    assert by_name["trees"].num_accepted_tokens > 10 and by_name["draft_model"].num_accepted_tokens > 10
    assert all(p.num_failures == 0 for p in proposers.stats())


@pytest.mark.parametrize("executor", ["torch", "transformers"])
def test_bfloat16_runs(tiny_target: Path, tiny_draft: Path, executor: str) -> None:
    dice = random.Random(5)
    jobs = jobs_of(dice, 6)
    engine = start(tiny_target, (DraftModelConfig(str(tiny_draft), 3),), executor, dtype="bfloat16")
    said = run(engine, jobs, [0] * len(jobs))
    assert all(len(t) for t in said.values())
    assert all(p.num_failures == 0 for p in engine.core.proposers.stats())


class Probe:
    """Wants hidden states and keeps what it is told."""

    name = "probe"
    max_tokens = 3

    def __init__(self, needs: Needs) -> None:
        self.needs = needs
        self.feedback: list[Feedback] = []
        self.texts: dict[str, list[int]] = {}

    def propose(self, context: DraftContext) -> Draft:
        guesses = []
        for row in context.rows:
            self.texts[row.request_id] = list(row.token_ids)
            guesses.append([(row.token_ids[-1] + 1) % 300, 5, 6][: row.ceiling])
        return Draft.chains(guesses)

    def observe(self, feedback: Feedback) -> None:
        self.feedback.append(feedback)

    def forget(self, request_id: str) -> None: ...
    def check(self) -> None: ...
    def close(self) -> None: ...


def test_states_that_a_transformers_target_does_not_give_are_refused_at_the_start(tiny_target: Path, tmp_path: Path) -> None:
    states = HiddenStatesConfig(str(tmp_path / "states"), (0, 2))
    with pytest.raises(ConfigError, match=r"does not give the hidden states \(0, 2\): of its 2 layers there are the inputs"):
        start(tiny_target, (states,), "transformers")
    start(tiny_target, (states,), "torch")


@pytest.mark.parametrize(("executor", "hidden"), [("torch", (0, 1, 2, FINAL)), ("transformers", (0, 1, FINAL))])
def test_hidden_states_of_all_tokens_reach_feedback(tiny_target: Path, executor: str, hidden: tuple[int, ...]) -> None:
    engine = start(tiny_target, (NgramConfig(3, 2, 1),), executor)
    probe = Probe(Needs(hidden=hidden))
    runner = Runner(engine.model.executor, engine.core.runner.kv, probe.needs.hidden, full_logits_wanted)
    engine = replace(engine, core=assemble(engine.config, engine.speculative, engine.model, runner, ProposerSet([probe])))
    prompts = [list(range(10, 40)), [7, 8, 9]]
    said = run(engine, [(p, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), 0) for p in prompts], [0, 0], poisoned=False)
    model = start(tiny_target, (), "torch").core.runner
    whole = {}
    for i, prompt in enumerate(prompts):
        text = prompt + said[f"r{i}"]
        whole[f"r{i}"] = Decoding(model.executor).feed([text], hidden).hidden
    seen: dict[str, int] = {}
    for feedback in probe.feedback:
        for r, request_id in enumerate(feedback.request_ids):
            first = feedback.query_start_loc[r]
            keep = feedback.num_scheduled[r] + len(feedback.accepted[r])
            start_at = seen.get(request_id, 0)
            for boundary in hidden:
                got = feedback.hidden[boundary][first : first + keep]
                want = whole[request_id][boundary][start_at : start_at + keep]
                assert torch.allclose(got, want, atol=1e-3), (boundary, request_id)
            seen[request_id] = start_at + keep
            assert feedback.num_committed[r] == seen[request_id]


def test_the_banner_says_what_computes(tiny_target: Path, tiny_draft: Path) -> None:
    engine = start(tiny_target, (DraftModelConfig(str(tiny_draft), 3),), "torch")
    told = {line[:12].strip(): line[12:] for line in engine.banner}
    assert list(told) == ["model", "executor", "speculation", "draft", "kv cache"]
    assert told["executor"] == "torch float32 (not native: executor torch was chosen)"
    assert told["draft"] == f"{tiny_draft.name}: {told['executor']}"


def test_threads_are_torchs_where_torch_computes(tiny_target: Path) -> None:
    model = ModelConfig(str(tiny_target), executor="torch", threads=3)
    boot(EngineConfig(model, CacheConfig(num_blocks=8), speculative=SpeculativeConfig(off=True)))
    assert torch.get_num_threads() == 3


@native_only
class TestNative:
    def banner(self, target: Path, draft: DraftModelConfig, **settings: Any) -> dict[str, str]:
        model, speculative = ModelConfig(str(target), **settings), SpeculativeConfig((draft,))
        engine = boot(EngineConfig(model, CacheConfig(num_blocks=8), speculative=speculative))
        return {line[:12].strip(): line[12:] for line in engine.banner}

    def test_formats_of_target_and_draft(self, tiny_target: Path, tiny_draft: Path) -> None:
        threads = native.threads()
        try:
            told = self.banner(tiny_target, DraftModelConfig(str(tiny_draft)), threads=2)
            assert told["executor"] == f"native {native.availability().isa}, bfloat16, 2 threads" and torch.get_num_threads() == 1
            assert told["draft"] == f"{tiny_draft.name}: native {native.availability().isa}, int8 weights, bfloat16, 2 threads"
        finally:
            native.set_threads(threads)
        told = self.banner(tiny_target, DraftModelConfig(str(tiny_draft), quantization="none"), quantization="int4", kv_cache_dtype="int8")
        assert "int4 weights, bfloat16, int8 cache" in told["executor"] and "int" not in told["draft"]

    def test_the_cache_is_counted_as_it_is_stored(self, tiny_target: Path) -> None:
        def num_bytes(**settings: Any) -> int:
            return load_model(ModelConfig(str(tiny_target), **settings), lambda line: None).executor.kv_block_bytes(16)

        wide, narrow = num_bytes(dtype="float32"), num_bytes(kv_cache_dtype="int8")
        assert wide // 4 < narrow < wide // 2


def test_a_cache_smaller_than_the_context_limits_requests_unless_the_length_was_asked_for(tmp_path: Path) -> None:
    folder = save_llama(tmp_path, hidden_size=64, num_layers=2, seed=0)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 8192}))
    cache, off = CacheConfig(kv_cache_gb=0.002), SpeculativeConfig(off=True)
    engine = boot(EngineConfig(ModelConfig(str(folder)), cache, speculative=off))
    num_tokens = engine.core.scheduler.kv.pool.num_blocks * cache.block_size
    assert 2048 < num_tokens < engine.model.max_model_len == 8192 and "the cache limits a request" in engine.banner[-1]
    assert engine.intake.requests("r", [1] * (num_tokens - 1), SamplingParams(max_tokens=None), 0.0)[0].max_tokens == 1
    with pytest.raises(ContextTooLong, match=f"maximum context length is {num_tokens} tokens, which is what the KV cache holds"):
        engine.intake.requests("r", [1] * num_tokens, SamplingParams(max_tokens=None), 0.0)
    with pytest.raises(ConfigError, match="one sequence of 8,192 tokens needs"):
        boot(EngineConfig(ModelConfig(str(folder), max_model_len=8192), cache, speculative=off))


GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ASKED = [([5, 6, 7, 8], GREEDY, 0), ([9, 8, 9, 8, 9], GREEDY, 0)]


@pytest.fixture(scope="module")
def answers(deep_target: Path) -> dict[str, Any]:
    return run(start(deep_target, (), "torch"), ASKED, [0, 0], poisoned=False)


@pytest.fixture
def with_graphs(monkeypatch: pytest.MonkeyPatch) -> list[GraphExecutor]:
    """Networks whose passes are recorded as on a GPU."""
    return bind_as_on_a_gpu(monkeypatch, FakeRecorder)


@pytest.mark.parametrize("method", ["draft_model", "draft_model, drawn", "eagle3", "medusa"])
def test_no_drafter_meets_its_first_guesses_while_somebody_waits(
    deep_target: Path,
    answers: dict[str, Any],
    with_graphs: list[GraphExecutor],
    method: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = str(write(method.split(",")[0], deep_target, tmp_path))
    configs = {
        "draft_model": DraftModelConfig(folder, 3), "eagle3": EagleConfig(folder, "eagle3", 3), "medusa": MedusaConfig(folder, 2),
        "draft_model, drawn": DraftModelConfig(folder, 3, draft_sample_method="probabilistic"),
    }
    lines: list[str] = []
    config = EngineConfig(
        ModelConfig(str(deep_target), dtype="float32", executor="torch"), CacheConfig(num_blocks=64, block_size=4),
        SchedulerConfig(max_num_batched_tokens=24, max_num_seqs=2), SpeculativeConfig((configs[method],), adaptive=False),
    )
    with monkeypatch.context() as hasty:
        hasty.setattr(proposer_set, "SLOW_CALL_S", 0.0)  # compiling is slow, and no fault
        hasty.setattr(proposer_set, "SLOW_TOKEN_S", 0.0)
        engine = boot(config, lines.append)
    assert not [record for record in caplog.records if "failed" in record.message]
    networks = [network for network in with_graphs[1:] if network.has_graphs]
    assert networks and all(network.captured.num_graphs for network in networks), "a network of the drafter was left out"
    ready = sum(network.captured.num_graphs for network in networks)
    assert any(draws for network in networks for *_, draws in network._chains) == method.endswith("drawn")
    told = [line for line in lines if "captur" in line]
    assert [told[0], told[2]] == ["capturing graphs", "capturing graphs of drafters"] and told[3].startswith(f"drafters: {ready} graphs")
    assert run(engine, ASKED, [0, 0], poisoned=False) == answers
    hot = [(prompt, replace(params, temperature=1.0, seed=1), priority) for prompt, params, priority in ASKED]
    run(engine, hot, [0, 0], poisoned=False)
    assert any(total.num_draft_tokens for total in engine.core.controller.counts.totals)
    assert all(health.num_failures == 0 for health in engine.core.proposers.stats())
    assert sum(network.captured.num_graphs for network in networks) == ready, "something was recorded while requests waited"
