"""Steps in rounds, end to end with a tiny checkpoint: what is said is what one pass a token says, and the books are right."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from in_rounds import (
    LOOKUP,
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

from foretoken import LLM
from foretoken.engine.engine_thread import Abort, EngineThread

pytestmark = [native_only, pytest.mark.usefixtures("guesses_much")]


@pytest.fixture(scope="module")
def looking(tiny_target: Path) -> Iterator[LLM]:
    with LLM(tiny_target, LOOKUP, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def watch(looking: LLM) -> Iterator[Watch]:
    watch = Watch(core_of(looking))
    yield watch
    watch.leave()


LEFT: dict[str, dict[str, Any]] = {
    "penalties": {"seed": 5, "presence_penalty": 1.0, "repetition_penalty": 1.2},
    "logprobs": {"temperature": 0, "logprobs": 2},
    "a bias": {"temperature": 0, "logit_bias": {65: 5.0}},
    "fewest tokens": {"temperature": 0, "min_tokens": 8, "ignore_eos": False},
    "bad words": {"temperature": 0, "bad_words": ["a"]},
    "allowed tokens": {"temperature": 0, "allowed_token_ids": [40, 41, 42, 43]},
    "no speculation": {"temperature": 0, "speculation": {"method": "off"}},
}


@pytest.mark.parametrize("kind", TAKEN)
@pytest.mark.parametrize("together", [False, True])
def test_what_is_said_is_the_same(plain: LLM, looking: LLM, watch: Watch, kind: str, together: bool) -> None:
    for prompts in [PROMPTS] if together else [[prompt] for prompt in PROMPTS]:
        assert say_the_same(looking, plain, prompts, params(TAKEN[kind]))
    assert watch.calls
    if kind != "few tokens" and "stop" not in kind:
        assert watch.num_passes > 2 * len(watch.calls), "hardly a step had several passes"


@pytest.mark.parametrize("kind", LEFT)
def test_what_has_to_be_seen_in_between_is_computed_pass_by_pass(plain: LLM, looking: LLM, watch: Watch, kind: str) -> None:
    prompts = PROMPTS[:2]
    assert say_the_same(looking, plain, prompts, params(LEFT[kind]))
    assert not watch.calls


def test_one_that_wants_no_guesses_gets_none_beside_others(plain: LLM, looking: LLM, watch: Watch) -> None:
    check_one_that_wants_none(plain, looking, watch)


def test_a_request_may_limit_its_guesses(looking: LLM, watch: Watch) -> None:
    generate(looking, PROMPTS[1:2], {"temperature": 0, "speculation": {"num_speculative_tokens": 1}})
    assert {draft.drafted for draft in watch.drafts} <= {1}


def test_predictions_are_counted_as_openai_counts_them(plain: LLM, looking: LLM, watch: Watch) -> None:
    (before,) = generate(plain, PROMPTS[:1], {"seed": 9})
    request = predicted(looking, before, {"seed": 9})
    assert answered(request) == before.outputs[0].token_ids
    drafts = [draft for draft in watch.drafts if draft.proposer == 0]
    assert looking._running().proposer_names[0] == "prediction"
    assert request.stats.accepted_prediction_tokens == sum(draft.accepted for draft in drafts) > 20
    assert request.stats.rejected_prediction_tokens == sum(draft.drafted - draft.accepted for draft in drafts) == 0


def test_the_counts_agree(looking: LLM, watch: Watch) -> None:
    before = looking.stats()
    outputs = generate(looking, PROMPTS, {"temperature": 0})
    after = looking.stats()
    assert after.num_drafts - before.num_drafts >= len(watch.drafts) > 0
    told = [output.metrics.speculative_decoding for output in outputs]
    assert after.num_draft_tokens - before.num_draft_tokens == sum(one.num_draft_tokens for one in told)
    assert after.num_accepted_tokens - before.num_accepted_tokens == sum(one.num_accepted_draft_tokens for one in told)
    for one in told:
        assert sum(one.acceptance_histogram) == one.num_spec_steps
        assert sum(n * steps for n, steps in enumerate(one.acceptance_histogram)) == one.num_accepted_draft_tokens
    for plan, verdict in watch.calls:
        assert all(1 <= row.num_passes <= len(verdict.tokens) for row in verdict.rows)
        if all(row.request.finish_reason is None or len(plan.rows) == 1 for row in plan.rows):
            assert all(row.num_passes == len(verdict.tokens) for row in verdict.rows)
    assert after.generation_tokens - before.generation_tokens == 40 * len(PROMPTS)
    assert after.num_steps - before.num_steps >= watch.num_passes
    assert after.estimated_speedup is not None and after.speculation_off is None


def test_more_requests_than_seats(tiny_target: Path, plain: LLM) -> None:
    """Whoever waits comes in when a seat is free, and rounds go on meanwhile."""
    prompts = [f"{prompt} {i}" for i in range(4) for prompt in PROMPTS]
    with LLM(tiny_target, LOOKUP, **OPTIONS | {"max_num_seqs": 3}) as llm:
        watch = Watch(core_of(llm))
        each = [params({"temperature": 0, "max_tokens": 10 + i}) for i in range(len(prompts))]
        assert say_the_same(llm, plain, prompts, each)
        assert any(plan.ends_with_row for plan, _ in watch.calls)
        for plan, verdict in watch.calls:
            if plan.ends_with_row:
                ended = [row.request for row in plan.rows if row.request.finish_reason is not None]
                assert len(verdict.tokens) <= plan.most_rounds and len(ended) <= 3
        core_of(llm).check()


def test_a_cache_that_is_nearly_full(tiny_target: Path, plain: LLM) -> None:
    with LLM(tiny_target, LOOKUP, **OPTIONS | {"kv_cache_gb": 0.0014}) as llm:
        watch = Watch(core_of(llm))
        each = params({"temperature": 0, "max_tokens": 60})
        assert say_the_same(llm, plain, PROMPTS, each)
        core_of(llm).check()
        assert watch.calls


def test_up_to_the_end_of_the_context(tiny_target: Path) -> None:
    check_up_to_the_end(tiny_target, LOOKUP)


@pytest.mark.parametrize(
    "config",
    [LOOKUP | {"adaptive": False}, LOOKUP | {"disable_by_batch_size": 1}, LOOKUP | {"num_branches": 2}, {"method": "suffix"}],
    ids=["fixed k", "too many rows", "branches", "suffix"],
)
def test_what_is_configured_otherwise_has_none(tiny_target: Path, config: dict[str, Any]) -> None:
    with LLM(tiny_target, config, **OPTIONS) as llm:
        core = core_of(llm)
        watch = None if core.rounds is None else Watch(core)
        generate(llm, PROMPTS[:2], {"temperature": 0})
        assert watch is None or all(len(plan.rows) == 1 for plan, _ in watch.calls)


@pytest.mark.parametrize("num_failing", [2, 1000])
def test_calls_that_fail_cost_nothing_but_time(
    tiny_target: Path, plain: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, num_failing: int
) -> None:
    """After three in a row there are no more."""
    with LLM(tiny_target, LOOKUP, **OPTIONS) as llm:
        fail(core_of(llm), monkeypatch, num_failing)
        assert say_the_same(llm, plain, PROMPTS, params({"temperature": 0}))
        assert sum("tried again as one pass" in record.message for record in caplog.records) == min(num_failing, 3)
        assert sum("steps in rounds are off" in record.message for record in caplog.records) == (num_failing > 3)
        core_of(llm).check()


def test_nothing_behind_a_stop_string_is_counted(plain: LLM, looking: LLM, watch: Watch) -> None:
    (whole,) = generate(plain, PROMPTS[:1], {"seed": 9})
    answer = whole.outputs[0]
    stop = answer.text[len(answer.text) // 4 :][:3]
    before = looking.stats()
    request = predicted(looking, whole, {"seed": 9, "stop": [stop]})
    after, stats, num_tokens = looking.stats(), request.stats, request.num_output_tokens
    assert request.finish_reason == "stop" and watch.calls and 0 < num_tokens < 40
    assert answered(request) == answer.token_ids[:num_tokens]
    assert stats.num_draft_tokens <= num_tokens + 16, "at most one guess goes beyond the end"
    assert after.num_draft_tokens - before.num_draft_tokens == stats.num_draft_tokens


def test_an_abort_in_between(looking: LLM, watch: Watch) -> None:
    core = core_of(looking)
    made = requests_of(looking, "abort", {"temperature": 0}, ([5, 6, 7] * 4, [9, 8] * 5))
    drive(core, made, lambda step: step == 1 and core.abort(made[0].request_id))
    assert made[0].finish_reason == "abort" and made[1].finish_reason == "length" and watch.calls


def test_somebody_who_waits_ends_the_step(looking: LLM, watch: Watch) -> None:
    core = core_of(looking)
    (request,) = requests_of(looking, "interrupted", {"temperature": 0}, [[5, 6, 7] * 4])

    def interrupt(step: int) -> None:
        core.interrupt()

    drive(core, [request], interrupt)
    assert [len(verdict.tokens) for _, verdict in watch.calls[1:]] == [1] * (len(watch.calls) - 1)
    core.resume()


def test_whoever_comes_to_the_engines_thread_ends_the_step(looking: LLM) -> None:
    core = core_of(looking)
    interrupted: list[str] = []
    thread = EngineThread(core, lambda deltas, at: None, lambda error: None)
    core.interrupt, before = lambda: interrupted.append("put"), core.interrupt  # type: ignore[method-assign]
    try:
        thread.put(Abort("nobody"))
    finally:
        core.interrupt = before  # type: ignore[method-assign]
    assert interrupted == ["put"]
