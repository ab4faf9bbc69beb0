"""Counting acceptance, and the window that forgets."""

from __future__ import annotations

from rows import a_request

from foretoken.engine.controller import Controller
from foretoken.engine.plan import PlanRow, RowVerdict, StepPlan, Verdict
from foretoken.engine.speculation_policy import ProposerInfo
from foretoken.engine.stats import EngineStats
from foretoken.proposers.config import SpeculativeConfig


def observed(controller: Controller, drafted: int, accepted: int, now: float, source: int = 1) -> None:
    row = PlanRow(a_request("r"), 2, 1, [5] * drafted, list(range(-1, drafted - 1)), [source] * drafted, [0], samples=True)
    controller.observe(StepPlan([row], 4), Verdict([RowVerdict(list(range(accepted)), [5] * accepted + [6])]), now)


def test_totals_positions_and_the_last_sixty_seconds() -> None:
    controller = Controller(SpeculativeConfig(), (ProposerInfo("prediction", 16), ProposerInfo("ngram", 5)))
    observed(controller, 5, 3, now=10.0)
    observed(controller, 5, 0, now=10.5)
    observed(controller, 4, 4, now=65.0)
    observed(controller, 0, 0, now=66.0)
    controller.check()
    stats = controller.fill(EngineStats(), 69.9)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 14, 7)
    assert stats.accepted_per_position == (2, 2, 2, 1)
    assert (stats.recent_drafts, stats.recent_draft_tokens, stats.recent_accepted_tokens) == (3, 14, 7)
    stats = controller.fill(EngineStats(), 70.0)
    assert (stats.recent_drafts, stats.recent_draft_tokens, stats.recent_accepted_tokens) == (1, 4, 4)
    assert [(p.name, p.num_drafts, p.num_accepted_tokens) for p in stats.proposers] == [("prediction", 0, 0), ("ngram", 3, 7)]


def test_why_speculation_was_off_is_counted() -> None:
    controller = Controller(SpeculativeConfig(disable_by_batch_size=2), (ProposerInfo("ngram", 5),))
    for rows in (1, 2, 3, 4):
        controller.share([], controller.limits(rows), 16)
    assert controller.fill(EngineStats(), 0.0).steps_with_speculation_off == {"batch size": 2}
    assert controller.fill(EngineStats(), 0.0).speculation_off == "batch size"


def test_no_tokens_wanted_means_no_proposer() -> None:
    controller = Controller(SpeculativeConfig(), (ProposerInfo("guess", 4),))
    assert controller.assign(a_request("r")) == (0, 4)
    for wish in ({"num_speculative_tokens": 0}, {"method": "off"}):
        assert controller.assign(a_request("r", speculation=wish)) == (-1, 0)


def test_no_proposer_is_a_reason_too() -> None:
    assert Controller(SpeculativeConfig(off=True), ()).limits(1).off == "no proposer configured"


def test_a_snapshot_names_the_rule_of_acceptance() -> None:
    for config, named in (
        (SpeculativeConfig(), ("match", False)),
        (SpeculativeConfig(rejection_sample_method="block"), ("block", False)),
        (SpeculativeConfig(synthetic_rates=(0.5,)), ("synthetic", True)),
    ):
        stats = Controller(config, ()).fill(EngineStats(), 0.0)
        assert (stats.acceptance, stats.is_lossy) == named
