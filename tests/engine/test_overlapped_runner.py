"""A runner that begins steps before they are planned says what the plain one says, whatever comes in between."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import simulation
import torch
from overlapping import overlapped_core, plain_core
from simulation import World, fresh, simulate

from foretoken.engine.controller import Controller
from foretoken.engine.core import EngineCore
from foretoken.engine.costs import LADDER, CostFigures, CostTable
from foretoken.engine.overlapped_runner import OverlappedRunner
from foretoken.engine.request import Request, SamplingParams
from foretoken.engine.speculation_policy import ProposerInfo
from foretoken.kernels import started
from foretoken.kernels.torch_executor import full_logits
from foretoken.proposers.config import PredictionConfig, SpeculativeConfig
from foretoken.proposers.prediction import PredictionProposer


def test_worlds_come_out_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrivals, ends, cancels, preemption and guesses in between; each output must equal the request run alone and plainly."""
    runners: list[OverlappedRunner] = []

    def build(world: World, proposers: Any, speculative: SpeculativeConfig, num_blocks: int, *rest: Any) -> EngineCore:
        if speculative.off:
            return plain_core(world, proposers, speculative, num_blocks, *rest)
        if world.seed % 2:
            speculative = SpeculativeConfig(disable_by_batch_size=0)  # nobody guesses, ever
        core = overlapped_core(world, proposers, speculative, num_blocks, *rest)
        assert isinstance(core.runner, OverlappedRunner)
        runners.append(core.runner)
        return core

    monkeypatch.setattr(simulation, "build_core", build)
    for seed in range(120):
        simulate(seed)
    assert sum(runner.num_used for runner in runners) > 100
    assert sum(runner.num_ahead - runner.num_used for runner in runners) > 20, "nothing that was begun was ever dropped"
    assert sum(runner.num_matched for runner in runners) > 500


def decoding_core(num_rows: int, max_tokens: int, **params: Any) -> EngineCore:
    world = World(5)
    world.block_size, world.config = 4, replace(world.config, max_num_batched_tokens=512, max_num_seqs=16)
    core = overlapped_core(world, [], SpeculativeConfig(off=True), 200)
    for row in range(num_rows):
        settings = SamplingParams(temperature=params.get("temperature", 0.0), ignore_eos=True, detokenize=False, max_tokens=None)
        core.add_request(Request(f"r{row}", [1, 2, 3 + row], settings, 0.0, max_tokens, seed=row))
    return core


def finish(core: EngineCore) -> int:
    steps = 0
    while core.has_work:
        core.step(0.0)
        core.check()
        steps += 1
    return steps


def test_plain_decoding_is_one_step_ahead_all_the_time() -> None:
    """Blocks are crossed, and the last step of all rows is known to be the last."""
    core = decoding_core(num_rows=5, max_tokens=30)
    steps = finish(core)
    runner = core.runner
    assert isinstance(runner, OverlappedRunner)
    assert (steps, runner.num_ahead, runner.num_used) == (30, 28, 28)  # the first two show that nothing changes


def test_rows_that_end_leave_the_others_ahead() -> None:
    core = decoding_core(num_rows=3, max_tokens=30)
    core.add_request(Request("short", [7, 8], SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False), 0.0, 9, seed=0))
    for step in range(14):
        core.step(0.0)
        if step == 10:
            core.abort("r1")  # what was begun holds one row too many
    finish(core)
    runner = core.runner
    assert isinstance(runner, OverlappedRunner)
    assert runner.num_ahead == runner.num_used == 28


def test_rows_that_draw_are_ahead_too() -> None:
    """Beside greedy ones, with penalties; one of them ends early. Each says what it says alone."""
    core = decoding_core(num_rows=2, max_tokens=25)
    settings: list[dict[str, Any]] = [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 4, "presence_penalty": 0.5}]
    drawn = [
        Request(f"d{i}", [5, 6, 7 + i], SamplingParams(ignore_eos=True, detokenize=False, **params), 0.0, 14 + 8 * i, seed=40 + i)
        for i, params in enumerate(settings)
    ]
    expected = [simulation.run_alone(World(5), fresh(request)) for request in drawn]
    for request in drawn:
        core.add_request(request)
    finish(core)
    runner = core.runner
    assert isinstance(runner, OverlappedRunner)
    assert runner.num_ahead == runner.num_used == 23
    assert [request.token_ids[3:] for request in drawn] == expected


def test_a_guess_that_is_found_throws_no_step_away() -> None:
    """The prediction is the end of the answer: it is found in mid-text, while the next plain step is under way."""
    world = World(5)
    world.block_size, world.config = 4, replace(world.config, max_num_batched_tokens=512, max_num_seqs=16)
    request = Request("r", [1, 2, 3], SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False), 0.0, 60, seed=0)
    answer = simulation.run_alone(world, request)
    request = fresh(request)
    request.prediction = answer[30:]
    core = overlapped_core(world, [PredictionProposer(PredictionConfig())], SpeculativeConfig(), 200)
    infos = [ProposerInfo(p.name, p.max_tokens, scout) for p, scout in zip(core.proposers.proposers, core.proposers.scouts, strict=True)]
    costs = CostTable(CostFigures({tokens: 0.01 + 0.0001 * tokens for tokens in LADDER}), core.proposers.names, 64)
    core.controller = core.scheduler.controller = Controller(SpeculativeConfig(), tuple(infos), costs)
    core.add_request(request)
    steps = finish(core)
    runner = core.runner
    assert isinstance(runner, OverlappedRunner)
    assert request.token_ids[3:] == answer and steps < 45
    assert runner.num_used == runner.num_ahead >= 15


def test_rows_that_want_logprobs_are_waited_for() -> None:
    core = decoding_core(num_rows=2, max_tokens=6)
    core.add_request(Request("l", [1], SamplingParams(temperature=1.0, logprobs=1, ignore_eos=True, detokenize=False), 0.0, 6, seed=1))
    finish(core)
    assert isinstance(core.runner, OverlappedRunner) and core.runner.num_ahead == 0


def test_a_request_that_comes_is_served_at_once() -> None:
    core = decoding_core(num_rows=2, max_tokens=20)
    for _ in range(5):
        core.step(0.0)
    late = Request("late", [4, 5, 6], SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False), 1.0, 4, seed=0)
    expected = simulation.run_alone(World(5), fresh(late))
    core.add_request(late)
    assert "late" in {delta.request_id for delta in core.step(1.0)}
    finish(core)
    assert late.token_ids[3:] == expected


def test_logits_are_copied_only_where_nobody_has_chosen_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps that are begun ahead all choices are made on the device. Those of the first one, and of the last, are left to others."""
    copied: list[int] = []

    def counted(computed: started.Computed, wanted: torch.Tensor) -> torch.Tensor | None:
        copied.append(len(wanted))
        return full_logits(computed, wanted)

    monkeypatch.setattr(started, "full_logits", counted)
    core = decoding_core(num_rows=3, max_tokens=30, temperature=1.0)
    steps = finish(core)
    runner = core.runner
    assert isinstance(runner, OverlappedRunner) and runner.num_used == 28 and steps == 30
    assert sum(map(bool, copied)) <= 2
