"""Steps in rounds with a draft model, end to end: what is said, what is counted and what the drafter has read is as of single steps."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixed_k import fixed
from in_rounds import (
    OPTIONS,
    PROMPTS,
    TAKEN,
    Watch,
    answered,
    check_one_that_wants_none,
    check_up_to_the_end,
    core_of,
    drive,
    fail,
    generate,
    params,
    predicted,
    requests_of,
    say_the_same,
)
from native_only import native_only
from variants import slow_but

from foretoken import LLM
from foretoken.engine.core import EngineCore
from foretoken.engine.policy import drafted_rounds
from foretoken.engine.policy.adaptive import AdaptivePolicy
from foretoken.engine.request import Request
from foretoken.engine.rounds import Lookups, Rounds
from foretoken.proposers.learned import LearnedProposer

pytestmark = native_only

K = 4


@pytest.fixture(scope="module")
def config(tiny_target: Path) -> dict[str, Any]:
    """The target itself in int4: it is right about half of the time."""
    return {"method": "draft_model", "model": str(tiny_target), "quantization": "int4", "num_speculative_tokens": K}


@pytest.fixture(scope="module")
def drafting(tiny_target: Path, config: dict[str, Any]) -> Iterator[LLM]:
    with LLM(tiny_target, fixed(config), **OPTIONS) as llm:
        yield llm


@pytest.fixture(autouse=True)
def _however_slow_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafted_rounds, "DRAFTED_STEP_S", 60.0)


@pytest.fixture
def watch(drafting: LLM) -> Iterator[Watch]:
    watch = Watch(core_of(drafting))
    yield watch
    watch.leave()


def one_by_one(patch: pytest.MonkeyPatch) -> None:
    """From now on every step is one pass."""
    patch.setattr(Rounds, "takes", lambda rounds, request: False)


def drafter_of(core: EngineCore) -> LearnedProposer:
    (drafter,) = [proposer for proposer in core.proposers.proposers if isinstance(proposer, LearnedProposer)]
    return drafter


def counted(llm: LLM) -> list[int]:
    """Drafts, their tokens, those accepted, and these by position."""
    stats = llm.stats()
    by_position = [*stats.accepted_per_position, *[0] * K][:K]
    return [stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens, *by_position]


def between(before: list[int], after: list[int]) -> list[int]:
    return [b - a for a, b in zip(before, after, strict=True)]


@pytest.mark.parametrize("kind", TAKEN)
@pytest.mark.parametrize("together", [False, True])
def test_what_is_said_is_the_same(plain: LLM, drafting: LLM, watch: Watch, kind: str, together: bool) -> None:
    for prompts in [PROMPTS] if together else [[prompt] for prompt in PROMPTS]:
        assert say_the_same(drafting, plain, prompts, params(TAKEN[kind]))
    if kind != "few tokens":
        assert watch.drafts and all(len(verdict.draft_seconds) == len(verdict.tokens) for _, verdict in watch.calls)


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"seed": 11}, {"temperature": 0, "max_tokens": 23}], ids=str)
def test_what_is_counted_is_the_same(drafting: LLM, watch: Watch, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    found: list[Any] = []
    for _ in range(2):
        before = counted(drafting)
        outputs = generate(drafting, PROMPTS, settings)
        told = [output.metrics.speculative_decoding for output in outputs]
        histograms = [(one.num_spec_steps, one.num_draft_tokens, one.acceptance_histogram) for one in told]
        found.append((between(before, counted(drafting)), histograms))
        one_by_one(monkeypatch)
    assert watch.num_passes > 2 * len(watch.calls) > 0
    assert found[0] == found[1]
    assert 0 < found[0][0][2] < found[0][0][1], "guesses were right and wrong"


def test_the_drafter_knows_what_it_has_read(drafting: LLM, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each step it is what it is after as many single ones; and so are the blocks that others may find."""
    core, drafter = core_of(drafting), drafter_of(core_of(drafting))
    read: list[dict[int, int]] = []
    for name in ("in rounds", "one by one"):
        (request,) = requests_of(drafting, name, {"temperature": 0, "max_tokens": 60}, ["nobody else says this"])
        at: dict[int, int] = {}

        def note(step: int, request: Request = request, at: dict[int, int] = at) -> None:
            if request.finish_reason is None and request.num_output_tokens:
                known = drafter._cache.num_known(request.request_id)
                assert known is not None and known < len(request.token_ids)
                at[len(request.token_ids)] = known
                if read:
                    return  # its blocks are copies, by whose names those of the first request are found
                filled = core.scheduler.kv.num_filled(request.request_id, core.proposers.names.index("draft_model"))
                assert (known - K - 1) // 16 * 16 <= filled <= known

        drive(core, [request], note)
        read.append(at)
        one_by_one(monkeypatch)
    assert watch.calls and len(read[0]) < len(read[1])
    assert read[0].items() <= read[1].items()


def test_a_request_that_joins_finds_all_in_order(plain: LLM, drafting: LLM, watch: Watch) -> None:
    core = core_of(drafting)
    first, second, third = requests_of(drafting, "joins", {"temperature": 0, "max_tokens": 80}, PROMPTS[:3])

    def join(step: int) -> None:
        core.interrupt()  # else all are done in a step
        if step in (4, 9):
            core.resume()
            core.add_request(second if step == 4 else third)

    drive(core, [first], join)
    core.resume()
    expected = generate(plain, PROMPTS[:3], {"temperature": 0, "max_tokens": 80})
    for request, output in zip((first, second, third), expected, strict=True):
        assert answered(request) == output.outputs[0].token_ids
    assert {len(plan.rows) for plan, _ in watch.calls} >= {1, 2, 3}


def test_steps_of_one_pass_in_between(plain: LLM, drafting: LLM, watch: Watch) -> None:
    """A row with logprobs beside it for a while."""
    core = core_of(drafting)
    (first,) = requests_of(drafting, "long", {"seed": 3, "max_tokens": 100}, PROMPTS[:1])
    (told,) = requests_of(drafting, "told", {"temperature": 0, "max_tokens": 9, "logprobs": 1}, PROMPTS[1:2])

    def join(step: int) -> None:
        core.interrupt()
        if step == 3:
            core.add_request(told)

    drive(core, [first], join)
    core.resume()
    expected = generate(plain, PROMPTS[:1], {"seed": 3, "max_tokens": 100})
    assert answered(first) == expected[0].outputs[0].token_ids
    assert watch.requests == {first.request_id} and any(len(verdict.tokens) for _, verdict in watch.calls)


def test_an_abort_in_between(plain: LLM, drafting: LLM, watch: Watch) -> None:
    core = core_of(drafting)
    made = requests_of(drafting, "abort", {"temperature": 0}, PROMPTS[:2])

    def abort(step: int) -> None:
        core.interrupt()
        if step == 3:
            core.abort(made[0].request_id)

    drive(core, made, abort)
    core.resume()
    assert made[0].finish_reason == "abort" and made[1].finish_reason == "length" and watch.calls
    expected = generate(plain, PROMPTS[1:2], {"temperature": 0})
    assert answered(made[1]) == expected[0].outputs[0].token_ids


def test_one_that_wants_no_guesses_gets_none_beside_others(plain: LLM, drafting: LLM, watch: Watch) -> None:
    check_one_that_wants_none(plain, drafting, watch)


def test_a_request_may_limit_its_guesses(drafting: LLM, watch: Watch) -> None:
    generate(drafting, PROMPTS[1:2], {"temperature": 0, "speculation": {"num_speculative_tokens": 2}})
    assert max(draft.drafted for draft in watch.drafts) == 2


def test_who_brings_a_prediction_takes_steps_of_one_pass(plain: LLM, drafting: LLM, watch: Watch) -> None:
    (before,) = generate(plain, PROMPTS[:1], {"seed": 9})
    request = predicted(drafting, before, {"seed": 9})
    assert answered(request) == before.outputs[0].token_ids
    assert request.stats.accepted_prediction_tokens > 20 and not watch.calls


def test_the_time_of_drafting_is_the_drafters(drafting: LLM, watch: Watch) -> None:
    before = drafting.stats()
    generate(drafting, PROMPTS, {"temperature": 0})
    after = drafting.stats()
    in_rounds = sum(sum(verdict.draft_seconds) for _, verdict in watch.calls)
    spent = after.proposers[-1].draft_seconds - before.proposers[-1].draft_seconds
    assert spent >= in_rounds > 0
    passes = sum(sum(verdict.seconds) for _, verdict in watch.calls)
    assert after.target_seconds - before.target_seconds >= passes
    assert after.step_seconds - before.step_seconds >= after.target_seconds - before.target_seconds + spent


@pytest.mark.parametrize("seed", slow_but(range(2), range(8)))
def test_any_requests_at_any_time(tiny_target: Path, config: dict[str, Any], plain: LLM, seed: int) -> None:
    """They come, wait for seats, are pushed out of a small cache, aborted and interrupted."""
    rng = random.Random(seed)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0}, {"temperature": 0.6}, {"temperature": 1.0, "top_p": 0.8}, {"temperature": 0, "logprobs": 1},
        {"temperature": 0, "speculation": {"method": "off"}}, {"temperature": 0, "speculation": {"num_speculative_tokens": 2}},
    ]
    asked = [
        ([rng.randrange(3, 300) for _ in range(rng.randrange(1, 60))], rng.choice(kinds) | {"seed": i, "max_tokens": rng.randrange(1, 70)})
        for i in range(16)
    ]

    def made(llm: LLM) -> list[Request]:
        intake = llm._running().intake
        return [request for i, (prompt, kind) in enumerate(asked) for request in intake.requests(f"any-{i}", prompt, params(kind), 0.0)]

    expected = made(plain)
    drive(core_of(plain), expected)
    options = {name: value for name, value in OPTIONS.items() if name != "kv_cache_gb"}
    with LLM(tiny_target, fixed(config), **options | {"num_gpu_blocks_override": 12, "max_num_seqs": 4}) as llm:
        core = core_of(llm)
        watch, waiting, step = Watch(core), made(llm), 0
        requests = [*waiting]
        while waiting or core.has_work:
            for _ in range(rng.randrange(3) if waiting else 0):
                core.add_request(waiting.pop())
                if not waiting:
                    break
            if rng.random() < 0.5:
                core.interrupt()
            core.step(float(step))
            core.resume()
            core.check()
            step += 1
            if rng.random() < 0.03 and core.scheduler.running:
                core.abort(rng.choice(core.scheduler.running).request_id)
                core.check()
        assert core.scheduler.num_preemptions and watch.drafts
    for request, other in zip(requests, expected, strict=True):
        assert request.finish_reason in ("length", "abort")
        assert request.token_ids == other.token_ids[: len(request.token_ids)]
        assert request.finish_reason == "abort" or len(request.token_ids) == len(other.token_ids)


@pytest.mark.parametrize("longest", [None, 40])
def test_up_to_the_end_of_the_contexts(tiny_target: Path, config: dict[str, Any], longest: int | None) -> None:
    """The target's, or the drafter's: then it goes on without guesses."""
    check_up_to_the_end(tiny_target, fixed(config if longest is None else config | {"max_model_len": longest}))


@pytest.mark.parametrize("sampled", [{"draft_sample_method": "probabilistic"}, {"confidence_threshold": 0.5}], ids=str)
def test_drafters_that_sample_or_doubt(tiny_target: Path, config: dict[str, Any], plain: LLM, sampled: dict[str, Any]) -> None:
    with LLM(tiny_target, fixed(config | sampled), **OPTIONS) as llm:
        watch = Watch(core_of(llm))
        each = params({"seed": 2, "temperature": 0.8})
        with pytest.MonkeyPatch.context() as patch:
            found: list[Any] = []
            for _ in range(2):
                before = counted(llm)
                assert say_the_same(llm, plain, PROMPTS, each)
                found.append(between(before, counted(llm)))
                one_by_one(patch)
        assert watch.calls and found[0] == found[1]


def test_adaptive_drafters_are_asked_in_rounds_too(
    tiny_target: Path, config: dict[str, Any], plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It learns from them what it learns from single steps, as if guessing paid."""
    with LLM(tiny_target, config | {"model": str(tiny_target), "quantization": "int8"}, **OPTIONS) as llm:
        core = core_of(llm)
        watch, policy = Watch(core), core.controller.policy
        assert isinstance(policy, AdaptivePolicy)
        costs = policy.costs
        monkeypatch.setattr(costs.drafts[-1], "seconds", lambda depth, rows: 1e-9 * depth)
        monkeypatch.setattr(type(costs.target), "at", lambda cost, context: lambda tokens: 1e-3 + 1e-9 * tokens)
        for settings in ({"temperature": 0, "max_tokens": 200}, {"seed": 5, "max_tokens": 100}):
            assert say_the_same(llm, plain, PROMPTS, params(settings))
        assert len(watch.drafts) > 20 and policy.expectations.acceptance[-1].num_seen > 10
        stats = llm.stats()
        assert stats.num_drafts >= len(watch.drafts) and stats.estimated_speedup is not None
        core.check()


@pytest.mark.parametrize(
    "others",
    [[{"method": "ngram", "num_speculative_tokens": 3}], [{"method": "suffix"}], [None]],
    ids=["ngram", "suffix", "another draft"],
)
def test_beside_other_proposers_there_are_none(tiny_target: Path, config: dict[str, Any], others: list[Any]) -> None:
    beside = [config if other is None else other for other in others]
    with LLM(tiny_target, fixed([config, *beside]), **OPTIONS) as llm:
        assert Lookups.among(core_of(llm).proposers.proposers).drafting is None and core_of(llm).rounds is None


def test_a_drafter_that_is_off_guesses_nowhere(tiny_target: Path, config: dict[str, Any], plain: LLM) -> None:
    with LLM(tiny_target, fixed(config), **OPTIONS) as llm:
        core = core_of(llm)
        watch = Watch(core)
        core.proposers._members[-1].health.off_reason = "of a test"
        each = params({"temperature": 0})
        assert say_the_same(llm, plain, PROMPTS, each)
        assert not watch.calls and not llm.stats().num_drafts


def test_a_call_that_fails_costs_nothing_but_time(
    plain: LLM, drafting: LLM, watch: Watch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail(core_of(drafting), monkeypatch, 2)
    assert say_the_same(drafting, plain, PROMPTS, params({"temperature": 0}))
    assert sum("tried again as one pass" in record.message for record in caplog.records) == 2
    core_of(drafting).check()
