"""Several plain passes in one call, where a script generates without speculation: what is said is what one pass a token says."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from in_rounds import OPTIONS, PROMPTS, TAKEN, Watch, core_of, generate, params, say_the_same
from native_only import native_only

from foretoken import LLM
from foretoken.engine import llm_options
from foretoken.engine.config import SchedulerConfig
from foretoken.engine.policy import fixed

pytestmark = native_only


@pytest.fixture(scope="module")
def one_by_one(tiny_target: Path) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm_options, "LONGEST_UNSEEN_S", 0.0)
        llm = LLM(tiny_target, {"method": "off"}, **OPTIONS)
    with llm:
        yield llm


@pytest.fixture
def watch(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    monkeypatch.setattr(fixed, "SHORTEST_PASS_S", 0.0)  # a tiny network's are shorter than any that is worth it
    watch = Watch(core_of(plain))
    yield watch
    watch.leave()


@pytest.mark.parametrize("kind", TAKEN)
@pytest.mark.parametrize("together", [False, True])
def test_what_is_said_is_the_same(one_by_one: LLM, plain: LLM, watch: Watch, kind: str, together: bool) -> None:
    for prompts in [PROMPTS] if together else [[prompt] for prompt in PROMPTS]:
        assert say_the_same(plain, one_by_one, prompts, params(TAKEN[kind]))
    assert all(not said.drafts for _, verdict in watch.calls for said in verdict.rows)
    if kind != "few tokens" and "stop" not in kind:
        assert watch.num_passes > 2 * len(watch.calls) > 0, "hardly a step had several passes"


def test_passes_are_counted_as_steps_without_speculation(plain: LLM, watch: Watch) -> None:
    before = plain.stats()
    generate(plain, PROMPTS[:1], {"temperature": 0})
    after = plain.stats()
    counts = [dict(stats.steps_with_speculation_off).get("no proposer configured", 0) for stats in (before, after)]
    assert watch.calls and counts[1] - counts[0] == after.num_steps - before.num_steps == 40


def test_short_passes_and_streams_have_a_step_each(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SchedulerConfig().longest_unseen_s == 0, "a server's clients see each token when it comes"
    monkeypatch.setattr(fixed, "SHORTEST_PASS_S", 60.0)
    watch = Watch(core_of(plain))
    generate(plain, PROMPTS[:2], {"temperature": 0})
    watch.leave()
    assert not watch.calls
