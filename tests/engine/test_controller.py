"""Counting acceptance, and the window that forgets."""

from array import array
from dataclasses import replace

import pytest
from rows import a_request

from foretoken.engine.controller import Controller
from foretoken.engine.plan import PlanRow, RowGrant, RowVerdict, StepPlan, Verdict
from foretoken.engine.policy.base import ProposerInfo, StepTimes, Wish
from foretoken.engine.policy.costs import LADDER, CostFigures, CostTable
from foretoken.engine.stats import EngineStats
from foretoken.proposers.base import Draft
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
    assert (stats.recent_draft_tokens, stats.recent_accepted_tokens) == (14, 7)
    stats = controller.fill(EngineStats(), 70.0)
    assert (stats.recent_draft_tokens, stats.recent_accepted_tokens) == (4, 4)
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


def test_the_limit_is_that_of_whoever_may_guess_most_predictions_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    infos = (ProposerInfo("prediction", 64), ProposerInfo("draft_model", 5), ProposerInfo("ngram", 8))
    for config, most in ((SpeculativeConfig(), 8), (SpeculativeConfig(num_speculative_tokens_per_batch_size=((1, 4, 3),)), 3)):
        controller = Controller(config, infos)
        controller.share([], controller.limits(2), 16)
        assert controller.fill(EngineStats(), 0.0).num_speculative_tokens == most
        monkeypatch.setattr(controller.policy, "rests", lambda num_rows: True)
        for num_rows in (2, 5):
            controller.share([], controller.limits(num_rows), 16)
            stats = controller.fill(EngineStats(), 0.0)
            allowed = most if num_rows == 2 else 8
            assert (stats.num_speculative_tokens, stats.mean_draft_ceiling) == (allowed, 0), "of a step without drafts, too"


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


def test_a_drafter_that_is_unsure_of_good_guesses_is_found_out() -> None:
    """What it thinks of them itself is next to nothing, and two of three are right: until that is known none is left out for it."""
    figures = CostFigures({tokens: 0.01 + 0.0001 * tokens for tokens in LADDER}, draft={"draft_model": {(1, 1): 0.001, (3, 1): 0.003}})
    costs = CostTable(figures, ("draft_model",), 64)
    controller = Controller(SpeculativeConfig(), (ProposerInfo("draft_model", 3),), costs)
    request = a_request("r", 1)
    verified: list[int] = []
    for _ in range(60):
        controller.look([request])
        ((assigned, ceiling),) = controller.share([Wish(request, 1, 16)], controller.limits(1), 16)
        draft = replace(Draft.chains([[5] * ceiling]), confidence=[0.002] * ceiling)
        grant = RowGrant(request, request.num_computed_tokens, 1, ceiling, assigned, array("i", [0]), (0,))
        cut = controller.cut([grant], draft) if ceiling else None
        size = ceiling if cut is None else cut[0]
        verified.append(size)
        row = PlanRow(request, request.num_computed_tokens, 1, [5] * size, list(range(-1, size - 1)), [0] * size, [0], samples=True)
        accepted = list(range(min(2, size)))
        times = StepTimes(costs.target.seconds(1 + size), (costs.drafts[0].seconds(ceiling, 1),))
        controller.observe(StepPlan([row], 4), Verdict([RowVerdict(accepted, [5] * len(accepted) + [6])]), 0.0, times)
    assert verified[0] == 3 and sum(map(bool, verified)) > 50 and sum(verified[-20:]) >= 40


@pytest.mark.parametrize("is_adaptive", [False, True])
def test_a_tree_may_have_more_guesses_than_tokens_are_to_come(is_adaptive: bool) -> None:
    """A chain may not, and nobody knows that guesses branch before they do."""
    costs = CostTable(CostFigures({tokens: 0.01 for tokens in LADDER}, draft={"eagle": {(1, 1): 1e-6, (9, 1): 1e-6}}), ("eagle",), 64)
    controller = Controller(SpeculativeConfig(), (ProposerInfo("eagle", 9),), costs if is_adaptive else None)
    request = a_request("r", 1)
    for parents, most in (([-1, 0, 1], 3), ([-1, 0, -1], 3), ([-1], 9)):
        controller.look([request])
        ((_, k),) = controller.share([Wish(request, 1, 16, 3)], controller.limits(1), 16)
        assert k == most
        row = PlanRow(request, 1, 1, [5] * len(parents), parents, [0] * len(parents), [0], samples=True)
        controller.observe(StepPlan([row], 4), Verdict([RowVerdict([0], [5, 6])]), 0.0, StepTimes(0.01, (0.0,)))


def test_steps_without_guesses_are_no_slower_than_they_are() -> None:
    """The estimated speed-up goes to 1 where nobody guesses any more, however long such steps take."""
    figures = CostFigures({tokens: 0.01 for tokens in LADDER}, draft={"ngram": {(1, 1): 1e-6, (3, 1): 1e-6}})
    controller = Controller(SpeculativeConfig(), (ProposerInfo("ngram", 3),), CostTable(figures, ("ngram",), 64))
    for request, took_s in ((a_request("r", 1), 0.01), (a_request("s", 1, speculation={"method": "off"}), 0.03)):
        for _ in range(600):
            controller.look([request])
            ((_, k),) = controller.share([Wish(request, 1, 16)], controller.limits(1), 16)
            row = PlanRow(request, 1, 1, [5] * k, list(range(-1, k - 1)), [0] * k, [0], samples=True)
            said = Verdict([RowVerdict(list(range(k)), [5] * k + [6])])
            controller.observe(StepPlan([row], 4), said, 0.0, StepTimes(took_s, (0.0,)))
        speedup = controller.fill(EngineStats(), 0.0).estimated_speedup
        assert speedup == pytest.approx(4.0 if took_s == 0.01 else 1.0, rel=0.1)
