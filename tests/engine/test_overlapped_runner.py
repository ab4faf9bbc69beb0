"""A runner that begins steps before they are planned says what the plain one says, whatever comes in between."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import overlapping
import pytest
import simulation
import torch
from overlapping import ChainHashModel, overlapped_core, runner_of, simulate_overlapped
from simulation import World, fresh

from foretoken.engine import overlapped_runner
from foretoken.engine.controller import Controller
from foretoken.engine.core import EngineCore
from foretoken.engine.overlapped_runner import OverlappedRunner
from foretoken.engine.plan import StepPlan, Verdict
from foretoken.engine.policy.base import ProposerInfo
from foretoken.engine.policy.costs import LADDER, CostFigures, CostTable
from foretoken.engine.request import Request, SamplingParams
from foretoken.engine.runner import Forward
from foretoken.kernels import started
from foretoken.kernels.layout import ForwardOutput, RaggedBatch
from foretoken.kernels.torch_executor import full_logits
from foretoken.proposers.base import Draft, DraftContext, Proposer
from foretoken.proposers.config import PredictionConfig, SpeculativeConfig
from foretoken.proposers.prediction import PredictionProposer

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)


class Counting(OverlappedRunner):
    """How many of the steps that were begun had guesses."""

    num_with_guesses = 0

    def start(self, plan: StepPlan) -> Forward:
        before = self.num_used
        forward = super().start(plan)
        self.num_with_guesses += self.num_used > before and any(row.draft_token_ids for row in plan.rows)
        return forward


def wide_world() -> World:
    world = World(5)
    world.block_size, world.config = 4, replace(world.config, max_num_batched_tokens=512, max_num_seqs=16)
    return world


def num_failed(caplog: pytest.LogCaptureFixture) -> int:
    """Steps that were tried again. The hash model raises where it reads what it should not."""
    return sum("failed and is tried again" in record.message for record in caplog.records)


Settings = Callable[[World, SpeculativeConfig], SpeculativeConfig]


def simulated(monkeypatch: pytest.MonkeyPatch, seeds: range, settings: Settings) -> list[Counting]:
    """Runners of worlds that speculate like that."""

    def overlapped(world: World, proposers: Any, speculative: SpeculativeConfig, *rest: Any) -> EngineCore:
        return overlapped_core(world, proposers, settings(world, speculative), *rest)

    monkeypatch.setattr(overlapping, "OverlappedRunner", Counting)
    return cast(list[Counting], simulate_overlapped(seeds, overlapped))


def test_worlds_come_out_the_same(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """With guesses of all kinds; in every other one nobody ever guesses."""
    nobody = SpeculativeConfig(disable_by_batch_size=0)
    runners = simulated(monkeypatch, range(120), lambda world, speculative: nobody if world.seed % 2 else speculative)
    assert sum(runner.num_used for runner in runners) > 1000 and not num_failed(caplog)
    assert sum(runner.num_ahead - runner.num_used for runner in runners) > 20, "nothing that was begun was ever dropped"
    assert sum(runner.num_matched for runner in runners) > 500


@pytest.mark.slow
def test_worlds_of_a_draft_model_come_out_the_same(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Its chains are begun behind the walk, and the target's next pass behind them."""

    def proposers(world: World) -> list[Proposer]:
        world.head, world.draft_model = False, "poor" if world.seed % 3 else "perfect"
        network = ChainHashModel(simulation.VOCAB, errs=world.draft_model == "poor")
        return [simulation.draft_model("draft_model", network, world.num_blocks, world.block_size, 1 + world.seed % 5)]

    monkeypatch.setattr(World, "proposers", proposers)
    some, most = SpeculativeConfig(disable_by_batch_size=2), SpeculativeConfig(disable_by_batch_size=16)
    runners = simulated(monkeypatch, range(150), lambda world, _: most if world.seed % 4 else some)
    with_guesses, used = sum(runner.num_with_guesses for runner in runners), sum(runner.num_used for runner in runners)
    assert not num_failed(caplog)
    assert with_guesses > 300 and sum(runner.num_ahead for runner in runners) < 1.2 * used


def test_what_was_begun_for_another_step_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """Guesses are changed on their way to the plan, steps fail and are computed anew, and blocks behind the text go and others come."""
    dropped = used = faults = 0
    for seed in range(60):
        dice, world = random.Random(seed), World(5)
        world.block_size, world.config = dice.choice([1, 2, 4]), replace(world.config, max_num_batched_tokens=512, max_num_seqs=16)
        drafter = simulation.draft_model("draft_model", ChainHashModel(simulation.VOCAB, errs=seed % 2 > 0), 200, world.block_size, 3)
        core = overlapped_core(world, [drafter], SpeculativeConfig(disable_by_batch_size=16), 200)
        requests = [Request(f"r{i}", [1, 2, 3 + i], GREEDY, 0.0, 30 + i, seed=i) for i in range(3)]
        propose, verify, kv = core.proposers.propose, core.verifier.verify, core.scheduler.kv

        def changed(context: DraftContext, propose: Any = propose, dice: random.Random = dice) -> Draft:
            draft = propose(context)
            if draft.token_ids and dice.random() < 0.2:
                draft.token_ids[dice.randrange(len(draft.token_ids))] = dice.randrange(simulation.VOCAB)
            return draft

        def failing(plan: StepPlan, target: ForwardOutput, verify: Any = verify, dice: random.Random = dice) -> Verdict:
            nonlocal faults
            if any(row.draft_token_ids for row in plan.rows) and dice.random() < 0.1:
                faults += 1
                raise RuntimeError("a fault of the device")
            return verify(plan, target)

        core.proposers.propose, core.verifier.verify = changed, failing
        for request in requests:
            core.add_request(request)
        while core.has_work:
            core.step(0.0)
            core.check()
            if dice.random() < 0.2:
                for request in core.scheduler.running:
                    kv.look_ahead(request.request_id, 0, 0)
                    kv.roll_back(request.request_id)
        for request in requests:
            assert request.token_ids[3:] == simulation.run_alone(world, fresh(request))
        runner = runner_of(core)
        used, dropped = used + runner.num_used, dropped + runner.num_ahead - runner.num_used
    assert used > 200 and dropped > 100
    assert num_failed(caplog) == faults > 50


def decoding_core(num_rows: int, max_tokens: int, **params: Any) -> EngineCore:
    world = wide_world()
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
    runner = runner_of(core)
    assert (steps, runner.num_ahead, runner.num_used) == (30, 28, 28)  # the first two show that nothing changes


def test_rows_that_end_leave_the_others_ahead() -> None:
    core = decoding_core(num_rows=3, max_tokens=30)
    core.add_request(Request("short", [7, 8], GREEDY, 0.0, 9, seed=0))
    for step in range(14):
        core.step(0.0)
        if step == 10:
            core.abort("r1")  # what was begun holds one row too many
    finish(core)
    runner = runner_of(core)
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
    runner = runner_of(core)
    assert runner.num_ahead == runner.num_used == 23
    assert [request.token_ids[3:] for request in drawn] == expected


def test_a_guess_that_is_found_throws_no_step_away() -> None:
    """The prediction is the end of the answer: it is found in mid-text, while the next plain step is under way."""
    world = wide_world()
    request = Request("r", [1, 2, 3], GREEDY, 0.0, 60, seed=0)
    answer = simulation.run_alone(world, request)
    request = fresh(request)
    request.prediction = answer[30:]
    core = overlapped_core(world, [PredictionProposer(PredictionConfig())], SpeculativeConfig(), 200)
    infos = [ProposerInfo(p.name, p.max_tokens, scout) for p, scout in zip(core.proposers.proposers, core.proposers.scouts, strict=True)]
    costs = CostTable(CostFigures({tokens: 0.01 + 0.0001 * tokens for tokens in LADDER}), core.proposers.names, 64)
    core.controller = core.scheduler.controller = Controller(SpeculativeConfig(), tuple(infos), costs)
    core.add_request(request)
    steps = finish(core)
    runner = runner_of(core)
    assert request.token_ids[3:] == answer and steps < 45
    assert runner.num_used == runner.num_ahead >= 15


def test_steps_that_are_begun_in_vain_are_begun_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    core = decoding_core(num_rows=2, max_tokens=300)
    runner = runner_of(core)
    with monkeypatch.context() as patched:
        patched.setattr(overlapped_runner._Expected, "nodes", lambda *_: None)  # nothing that is planned is what was begun
        for _ in range(150):
            core.step(0.0)
    assert 0 < runner.num_ahead < 10 and runner.num_used == 0
    begun = runner.num_ahead
    finish(core)
    assert runner.num_ahead - begun == runner.num_used > 80


def test_a_step_that_cannot_be_begun_harms_nobody(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    core = decoding_core(num_rows=1, max_tokens=30)
    (request,) = core.scheduler.requests.values()

    def failing(*_: object) -> RaggedBatch:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(overlapped_runner, "following", failing)
    finish(core)
    assert len(request.token_ids) == 33 and request.token_ids[3:] == simulation.run_alone(World(5), fresh(request))
    assert sum("no step is begun" in record.message for record in caplog.records) == 1 and not num_failed(caplog)


def test_a_row_that_the_drafter_cannot_read_stops_nobody() -> None:
    """Its text is longer than the drafter can read."""
    world = wide_world()
    drafter = simulation.draft_model("draft_model", ChainHashModel(simulation.VOCAB), 200, 4, 3, max_model_len=60)
    core = overlapped_core(world, [drafter], SpeculativeConfig(disable_by_batch_size=16), 200)
    for i, length in enumerate((3, 3, 70)):
        core.add_request(Request(f"r{i}", [1 + (i + n) % 9 for n in range(length)], GREEDY, 0.0, 12 if i == 2 else 60, seed=i))
    steps = finish(core)
    runner = runner_of(core)
    assert runner.num_ahead == runner.num_used > steps - 8


def test_rows_that_want_logprobs_are_waited_for() -> None:
    core = decoding_core(num_rows=2, max_tokens=6)
    core.add_request(Request("l", [1], SamplingParams(temperature=1.0, logprobs=1, ignore_eos=True, detokenize=False), 0.0, 6, seed=1))
    finish(core)
    assert isinstance(core.runner, OverlappedRunner) and core.runner.num_ahead == 0


def test_a_request_that_comes_is_served_behind_the_step_that_has_begun() -> None:
    """Its prompt could not be computed any sooner, and what was begun is not in vain."""
    core = decoding_core(num_rows=2, max_tokens=20)
    for _ in range(5):
        core.step(0.0)
    late = Request("late", [4, 5, 6], GREEDY, 1.0, 4, seed=0)
    expected = simulation.run_alone(World(5), fresh(late))
    core.add_request(late)
    assert [{delta.request_id for delta in core.step(1.0)} for _ in range(2)] == [{"r0", "r1"}, {"r0", "r1", "late"}]
    finish(core)
    runner = runner_of(core)
    assert runner.num_ahead == runner.num_used
    assert late.token_ids[3:] == expected


def test_logits_are_copied_only_where_nobody_has_chosen_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """All choices are made on the device."""
    copied: list[int] = []

    def counted(computed: started.Computed, wanted: torch.Tensor) -> torch.Tensor | None:
        copied.append(len(wanted))
        return full_logits(computed, wanted)

    monkeypatch.setattr(started, "full_logits", counted)
    core = decoding_core(num_rows=3, max_tokens=30, temperature=1.0)
    steps = finish(core)
    runner = runner_of(core)
    assert runner.num_used == 28 and steps == 30
    assert not any(copied)
