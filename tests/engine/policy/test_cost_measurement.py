"""What is measured at start is what steps take, in the time there is, and nothing of it is seen afterwards."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from native_only import native_only

from foretoken.engine import boot as boot_module
from foretoken.engine.boot import Engine, assemble, boot
from foretoken.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from foretoken.engine.core import EngineCore
from foretoken.engine.policy import cost_measurement
from foretoken.engine.policy.adaptive import AdaptivePolicy
from foretoken.engine.policy.cost_measurement import measure
from foretoken.engine.policy.costs import LADDER, CostFigures
from foretoken.engine.request import Request, SamplingParams
from foretoken.engine.shaped_steps import Filler, ShapedSteps
from foretoken.kernels import native
from foretoken.kernels.layout import Executor, ForwardOutput, RaggedBatch
from foretoken.proposers.base import Draft, DraftContext, Feedback, Needs, Proposer
from foretoken.proposers.config import DraftModelConfig, NgramConfig, SpeculativeConfig
from foretoken.proposers.proposer_set import ProposerSet

TEXT = [7, 8, 9, 10, 11]
NO_SPECULATION = SpeculativeConfig(adaptive=False)


def start(
    target: Path,
    *proposers: Any,
    blocks: int = 200,
    block_size: int = 4,
    adaptive: bool = True,
    executor: str = "torch",
    **scheduler: int,
) -> Engine:
    return boot(
        EngineConfig(
            ModelConfig(str(target), executor=executor),
            CacheConfig(num_blocks=blocks, block_size=block_size),
            SchedulerConfig(**({"max_num_batched_tokens": 64, "max_num_seqs": 8} | scheduler)),
            SpeculativeConfig(proposers, adaptive=adaptive, off=not proposers),
        )
    )


def cores_of(engine: Engine) -> Callable[[ProposerSet], EngineCore]:
    return lambda alone: assemble(engine.config, NO_SPECULATION, engine.model, engine.core.runner, alone)


class Slow:
    """A network that takes so long besides: a fixed time, and more for each token and each token of context."""

    def __init__(self, executor: Executor, base: float, per_token: float = 0.0, per_context: float = 0.0) -> None:
        self._run, self._of = executor.run, (base, per_token, per_context)
        self.num_runs = 0

    def run(self, *args: Any, **kwargs: Any) -> ForwardOutput:
        batch = args[0]
        base, per_token, per_context = self._of
        self.num_runs += 1
        time.sleep(base + per_token * len(batch.token_ids) + per_context * int(batch.seq_lens.sum()))
        return self._run(*args, **kwargs)


class Sleeper:
    """A drafter that takes a millisecond a guess and two a row, and counts what it is asked."""

    name = "sleeper"
    needs = Needs()
    max_tokens = 6

    def __init__(self, dies: bool = False) -> None:
        self.known: set[str] = set()
        self.dies = dies

    def propose(self, context: DraftContext) -> Draft:
        if self.dies:
            raise RuntimeError("the drafter died")
        self.known.update(row.request_id for row in context.rows)
        time.sleep(1e-3 * max(row.ceiling for row in context.rows) + 2e-3 * len(context.rows))
        return Draft.chains([[1] * row.ceiling for row in context.rows])

    def observe(self, feedback: Feedback) -> None: ...

    def forget(self, request_id: str) -> None:
        self.known.discard(request_id)

    def check(self) -> None: ...
    def close(self) -> None: ...


def measured(engine: Engine, monkeypatch: pytest.MonkeyPatch, slow: Slow, *proposers: Proposer, budget_s: float = 30.0) -> CostFigures:
    monkeypatch.setattr(engine.core.runner.executor, "run", slow.run)
    figures = measure(cores_of(engine), proposers, TEXT, budget_s)
    assert figures is not None
    return figures


def test_the_targets_times_are_found(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(tiny_target)
    figures = measured(engine, monkeypatch, Slow(engine.core.runner.executor, 2e-3, 3e-4, 2e-5))
    assert set(figures.target) <= set(LADDER) and {1, 2, 4, 8, 16, 32, 64} <= set(figures.target)
    seconds = list(figures.target.values())
    assert seconds == sorted(seconds)
    assert 2.3e-3 <= figures.target[1] and figures.target[64] - figures.target[1] >= 15e-3, "63 tokens of 0.3 ms each"
    assert figures.per_context_token > 5e-6


@native_only
def test_passes_alone_are_measured_where_they_are_short(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_measurement, "PASSES_S", 10.0)  # enough for all of them, however slow the machine is
    engine = start(tiny_target, executor="native", block_size=16)
    passes = measured(engine, monkeypatch, Slow(engine.core.runner.executor, 2e-3, 1e-4)).passes
    assert passes is not None and {1, 2, 4, 8} <= set(passes) <= set(LADDER) and max(passes) <= 64
    assert 2.1e-3 <= passes[1] and 0.5e-3 <= passes[8] - passes[1] <= 2e-3, "7 tokens of 0.1 ms each"
    assert measured(engine, monkeypatch, Slow(engine.core.runner.executor, 0.02), budget_s=0.5).passes is None
    engine.core.check()


@pytest.mark.parametrize("executor", ["torch", "native"])
def test_tokens_that_are_measured_differ(tiny_target: Path, monkeypatch: pytest.MonkeyPatch, executor: str) -> None:
    """A network with experts reads few of them for one token many times. Natively passes alone are measured first, else steps only."""
    if executor == "native" and native.availability().isa is None:
        pytest.skip(native.availability().reason)
    engine = start(tiny_target, executor=executor, block_size=16)
    run, different = engine.core.runner.executor.run, dict[int, int]()

    def noted(batch: RaggedBatch, *others: Any) -> ForwardOutput:
        size, found = len(batch.token_ids), len(batch.token_ids.unique())
        different[size] = different.get(size, found) if executor == "native" else max(different.get(size, 0), found)
        return run(batch, *others)

    monkeypatch.setattr(engine.core.runner.executor, "run", noted)
    assert measure(cores_of(engine), (), range(40), 30.0) is not None
    assert different[8] >= 6 and different[32] >= 12 and different[64] >= 12


def test_a_slow_network_has_few_rungs_and_a_slower_one_two(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(tiny_target)
    slow = Slow(engine.core.runner.executor, 0.02, 1e-3)
    figures = measured(engine, monkeypatch, slow, budget_s=1.0)
    assert {1, 4} <= set(figures.target) and len(figures.target) < 12
    slower = Slow(engine.core.runner.executor, 0.05)
    figures = measured(engine, monkeypatch, slower, Sleeper(), budget_s=0.1)
    assert set(figures.target) == {1, 4} and figures.per_context_token == 0.0
    assert figures.draft is not None and set(figures.draft["sleeper"]) == {(1, 1), (6, 1)}
    assert slower.num_runs < 20


def test_what_is_prepared_in_the_first_step_of_a_shape_is_no_part_of_its_time(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As kernels that are compiled and graphs that are recorded on a GPU: a third of a second each, more than there is time for."""

    class Preparing(Slow):
        def run(self, *args: Any, **kwargs: Any) -> ForwardOutput:
            batch = args[0]
            shape = len(batch.token_ids), len(batch.seq_lens)
            if shape not in shapes:
                shapes.add(shape)
                time.sleep(0.35)
            return super().run(*args, **kwargs)

    shapes: set[tuple[int, int]] = set()
    engine = start(tiny_target, max_num_batched_tokens=16)
    figures = measured(engine, monkeypatch, Preparing(engine.core.runner.executor, 2e-3), budget_s=1.0)
    assert {1, 2, 4, 8, 16} <= set(figures.target) and 0.35 * len(figures.target) > 1.0
    assert max(figures.target.values()) < 0.1


def test_a_drafters_preparation_is_no_part_of_its_time(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Preparing(Sleeper):
        num_calls = 0

        def propose(self, context: DraftContext) -> Draft:
            self.num_calls += 1
            if self.num_calls in (2, 5):  # not the prompt's
                time.sleep(0.4)
            return super().propose(context)

    engine = start(tiny_target)
    figures = measured(engine, monkeypatch, Slow(engine.core.runner.executor, 0.0), Preparing(), budget_s=1.0)
    assert figures.draft is not None and max(figures.draft["sleeper"].values()) < 0.2


def test_each_proposers_times_are_found_by_depth_and_rows(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(tiny_target)
    sleeper = Sleeper()
    figures = measured(engine, monkeypatch, Slow(engine.core.runner.executor, 0.0), sleeper)
    assert figures.draft is not None
    grid = figures.draft["sleeper"]
    assert set(grid) == {(k, rows) for k in (1, 4, 6) for rows in (1, 8)}
    assert all(seconds >= 1e-3 * k + 2e-3 * rows for (k, rows), seconds in grid.items())
    assert grid[1, 1] < grid[6, 8], "3 ms against 22"
    assert not sleeper.known, "the rows of the measurement were not forgotten"


def test_a_broken_proposer_has_no_times_and_harms_nobody(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(tiny_target)
    figures = measured(engine, monkeypatch, Slow(engine.core.runner.executor, 0.0), Sleeper(dies=True), Sleeper())
    assert figures.draft is not None and figures.draft["sleeper"] and figures.target[1] > 0


@pytest.mark.parametrize(("blocks", "max_num_seqs"), [(1, 1), (3, 1), (9, 6)])
def test_small_caches(tiny_target: Path, blocks: int, max_num_seqs: int) -> None:
    engine = start(tiny_target, blocks=blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=24)
    figures = measure(cores_of(engine), [], TEXT, 0.5)
    if blocks == 1:
        assert figures is None or set(figures.target) == {1}
    else:
        assert figures is not None and {1, 4} <= set(figures.target)


@pytest.mark.parametrize("tokens", [2, 8])
def test_a_token_budget_below_a_block(tiny_target: Path, tokens: int) -> None:
    """The text that steps stand behind is then read in several of them."""
    engine = start(tiny_target, block_size=16, max_num_seqs=2, max_num_batched_tokens=tokens)
    figures = measure(cores_of(engine), [Sleeper()], TEXT, 0.5)
    assert figures is None or (1 in figures.target and max(figures.target) <= tokens)


def test_steps_have_the_shape_that_was_told(tiny_target: Path) -> None:
    engine = start(tiny_target)
    core = cores_of(engine)(ProposerSet([Filler()]))
    steps = ShapedSteps(core, TEXT * 40, lambda: None)
    for num_rows, context, depths in ((1, 4, [3]), (3, 4, [2, 0, 5]), (1, 40, [6]), (3, 40, [1, 1, 1])):
        steps.start(num_rows, context)
        assert sum(r.num_computed_tokens for r in core.scheduler.running) == num_rows * (context + 1)
        sample = steps.step(depths)
        assert sample is not None and sample.num_tokens == num_rows + sum(depths) and sample.seconds > 0
        core.check()
    assert steps.step([60, 60, 60]) is None, "more than a step may hold"
    steps.stop()
    core.check()
    assert not core.has_work


def test_a_lengthened_text_is_in_the_cache_and_can_be_read(tiny_target: Path) -> None:
    engine = start(tiny_target)
    for tensor in (*engine.core.runner.kv.k, *engine.core.runner.kv.v):  # type: ignore[attr-defined]
        tensor.fill_(float("nan"))
    core = cores_of(engine)(ProposerSet([Filler()]))
    steps = ShapedSteps(core, TEXT * 40, lambda: None)
    steps.start(1, 4)
    steps.stop()
    hits = core.scheduler.kv.num_hit_tokens
    steps.lengthen(100)
    steps.start(2, 100)
    sample = steps.step([2, 2])
    assert sample is not None and sample.num_tokens == 6, "a place that nobody wrote was read"
    assert core.scheduler.kv.num_hit_tokens - hits == 4 + 2 * 100
    steps.stop()
    core.check()


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of each measurement that boot makes."""
    taken: list[float] = []

    def timed(*args: Any) -> CostFigures | None:
        started = time.perf_counter()
        figures = measure(*args)
        taken.append(time.perf_counter() - started)
        return figures

    monkeypatch.setattr(boot_module, "measure", timed)
    return taken


def test_boot_measures_once_and_leaves_no_trace(
    tiny_target: Path, tiny_draft: Path, measurements: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    proposers = (DraftModelConfig(str(tiny_draft), 3), NgramConfig(3, 2, 1))
    engine = start(tiny_target, *proposers)
    assert len(measurements) == 1 and measurements[0] < 60
    policy = engine.core.controller.policy
    assert isinstance(policy, AdaptivePolicy) and "adaptive" in engine.banner[2]
    stats = engine.core.stats()
    assert stats.num_steps == stats.generation_tokens == stats.kv_blocks_used == stats.prefix_cache_queries == 0
    assert all(p.draft_seconds == p.num_failures == 0 for p in engine.core.proposers.stats())
    assert not engine.core.scheduler.kv.pool.prefixes and not any(acceptance.num_seen for acceptance in policy.expectations.acceptance)
    engine.core.check()

    def answer(engine: Engine) -> list[int]:
        request = Request("r", [5, 6, 7] * 4, SamplingParams(temperature=0.0, ignore_eos=True), 0.0, 24, seed=1)
        engine.core.add_request(request)
        while engine.core.has_work:
            engine.core.step(0.0)
        return request.token_ids

    told = answer(engine)
    assert told == answer(start(tiny_target))
    learned = policy.costs.figures()
    engine.core.close()

    again = start(tiny_target, *proposers)
    assert len(measurements) == 1, "known costs were measured again"
    kept = again.core.controller.policy
    assert isinstance(kept, AdaptivePolicy)
    assert kept.costs.target.seconds(1) == pytest.approx(learned.target[1]) and answer(again) == told


def test_nothing_is_measured_where_nothing_is_decided(tiny_target: Path, measurements: list[float]) -> None:
    for engine in (start(tiny_target), start(tiny_target, NgramConfig(3, 2, 1), adaptive=False)):
        assert not isinstance(engine.core.controller.policy, AdaptivePolicy) and "adaptive" not in engine.banner[2]
    assert not measurements


def test_torch_draws_as_if_nothing_had_been_measured(tiny_target: Path) -> None:
    torch.manual_seed(5)
    before = torch.rand(3)
    torch.manual_seed(5)
    engine = start(tiny_target)
    measure(cores_of(replace(engine)), [], TEXT, 0.2)
    assert torch.equal(torch.rand(3), before)
