"""What a drafter is shown to be worth before anybody is served."""

import pytest

from foretoken.engine.boot import Engine, boot
from foretoken.engine.config import CacheConfig, EngineConfig, ModelConfig
from foretoken.engine.default_speculation import DEMO_DRAFT
from foretoken.engine.request import Request, SamplingParams
from foretoken.engine.self_test import SelfTest, self_test
from foretoken.proposers.config_reading import parse_speculative_config


@pytest.fixture(scope="module")
def engine() -> Engine:
    config = parse_speculative_config([{"method": "ngram"}, {"model": str(DEMO_DRAFT), "num_speculative_tokens": 4}])
    return boot(EngineConfig(ModelConfig(), CacheConfig(num_blocks=128), speculative=config))


def test_learned_proposers_are_tried_out_and_leave_no_trace(engine: Engine) -> None:
    (result,) = self_test(engine)
    assert result.name == "draft_model" and result.fault is None
    assert len(result.accepted) == 4 and result.num_drafts > 20
    assert 0.4 < result.accepted[0] < 1 and sorted(result.accepted, reverse=True) == list(result.accepted)
    assert "draft_model: accepted by position" in result.describe() and "next to nothing" not in result.describe()

    stats = engine.core.stats()
    assert stats.num_steps == stats.num_drafts == stats.generation_tokens == stats.kv_blocks_used == 0
    assert all(p.draft_seconds == 0 for p in engine.core.proposers.stats())
    engine.core.check()


def test_afterwards_the_engine_answers_as_without_it(engine: Engine) -> None:
    def answer(engine: Engine) -> list[int]:
        request = Request("r", [5, 6, 7, 8] * 5, SamplingParams(temperature=0.0, ignore_eos=True), 0.0, 24, seed=1)
        engine.core.add_request(request)
        while engine.core.has_work:
            engine.core.step(0.0)
        return request.token_ids

    self_test(engine)
    off = parse_speculative_config({"method": "off"})
    assert answer(engine) == answer(boot(EngineConfig(ModelConfig(), CacheConfig(num_blocks=16), speculative=off)))


def test_a_draft_that_knows_nothing_is_pointed_out() -> None:
    assert "does this checkpoint belong to this target" in SelfTest("eagle", (0.01, 0.0), 100, 0.5, None).describe()
    assert "made no guess" in SelfTest("eagle", (), 0, 0.5, "made no guess").describe()
