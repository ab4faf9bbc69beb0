"""Costs between what was measured, and how they follow what steps really take."""

import math
import random
from collections.abc import Callable, Mapping

import pytest

from foretoken.engine.policy.costs import LADDER, CostFigures, CostTable, DraftCost, TargetCost

RUNGS = {1: 10e-3, 4: 13e-3, 8: 20e-3, 16: 40e-3}
GRID = {(1, 1): 1e-3, (5, 1): 3e-3, (1, 8): 2e-3, (5, 8): 6e-3}


def target(rungs: Mapping[int, float] = RUNGS, per_context_token: float = 0.0, max_tokens: int = 64) -> TargetCost:
    return TargetCost(CostFigures(rungs, per_context_token), max_tokens)


class TestTarget:
    def test_straight_lines_between_what_was_measured(self) -> None:
        cost = target()
        assert [cost.seconds(n) for n in RUNGS] == pytest.approx(list(RUNGS.values()))
        assert cost.seconds(6) == pytest.approx(16.5e-3)
        assert cost.seconds(2.5) == pytest.approx(11.5e-3), "an expected number of tokens lies between two"
        assert cost.seconds(24) == pytest.approx(60e-3), "behind the last rung its slope"
        assert cost.seconds(128) == pytest.approx(2 * cost.seconds(64)), "behind the widest step in proportion"

    def test_context_costs_the_same_at_every_width(self) -> None:
        cost = target(per_context_token=1e-6)
        assert cost.seconds(1, 2000) == pytest.approx(12e-3) and cost.seconds(8, 2000) == pytest.approx(22e-3)

    def test_noise_at_the_end_of_the_ladder_does_not_make_wide_steps_cheap(self) -> None:
        cost = target({1: 10e-3, 8: 20e-3, 16: 19e-3})
        assert cost.seconds(64) >= cost.seconds(16)

    def test_one_rung_is_enough(self) -> None:
        assert target({1: 5e-3}).seconds(20) == pytest.approx(5e-3)

    @pytest.mark.parametrize("factor", [0.5, 0.8, 1.3, 2.0])
    def test_a_lasting_change_is_followed(self, factor: float) -> None:
        cost = target()
        for _ in range(60):
            cost.observe(8, 0, factor * RUNGS[8])
        assert cost.seconds(8) == pytest.approx(factor * RUNGS[8], rel=0.05)

    def test_the_whole_machine_is_expected_to_have_changed_a_little(self) -> None:
        cost = target()
        for _ in range(100):
            for tokens in (4, 8):
                cost.observe(tokens, 0, 1.3 * RUNGS[tokens])
        assert RUNGS[1] < cost.seconds(1) <= 1.35 * RUNGS[1] and RUNGS[16] < cost.seconds(16)

    def test_one_outlier_is_shrugged_off(self) -> None:
        cost = target()
        for _ in range(10):
            cost.observe(4, 0, RUNGS[4])
        cost.observe(4, 0, 50 * RUNGS[4])
        cost.observe(4, 0, RUNGS[4] / 50)
        assert cost.seconds(4) == pytest.approx(RUNGS[4], rel=0.01)

    def test_the_middle_of_the_noise_is_found(self) -> None:
        dice = random.Random(0)
        cost = target()
        for _ in range(400):
            cost.observe(4, 0, 15e-3 * math.exp(dice.gauss(0, 0.1)))
        assert cost.seconds(4) == pytest.approx(15e-3, rel=0.05)

    def test_what_was_never_measured_learns_at_once_and_from_its_neighbours(self) -> None:
        cost = target({1: 10e-3, 64: 10e-3})
        for _ in range(40):
            cost.observe(20, 0, 14e-3)
        assert cost.seconds(20) == pytest.approx(14e-3, rel=0.05)
        assert cost.seconds(22) > 10.5e-3, "its neighbour was never seen"
        assert cost.seconds(64) >= 0.9 * cost.seconds(20), "more tokens hardly cost less"

    def test_context_is_no_surprise(self) -> None:
        cost = target(per_context_token=1e-6)
        for _ in range(50):
            cost.observe(4, 5000, RUNGS[4] + 5e-3)
        assert cost.seconds(4) == pytest.approx(RUNGS[4], rel=0.01)

    @pytest.mark.parametrize("factor", [0.02, 20.0, 200.0])
    def test_a_wrong_slope_by_context_is_put_right(self, factor: float) -> None:
        """Both are true here: 300 us, and 0.05 us for each token of context."""
        dice = random.Random(0)
        cost = target({1: 300e-6, 6: 700e-6, 64: 4e-3}, per_context_token=factor * 5e-8)

        def truth(num_tokens: int, context: int) -> float:
            return (300e-6 + 80e-6 * (num_tokens - 1)) * dice.gauss(1.0, 0.03) + 5e-8 * context

        for _ in range(1500):
            tokens, context = dice.choice([1, 1, 6]), dice.randrange(60, 600)
            cost.observe(tokens, context, truth(tokens, context))
        for tokens in (1, 6):
            for context in (60, 250, 600):
                assert cost.seconds(tokens, context) == pytest.approx(truth(tokens, context), rel=0.2)

    def test_doubt_arises_from_repeated_surprise_and_ends(self) -> None:
        cost = target()
        assert not cost.in_doubt(4) and not cost.in_doubt(10_000)
        for _ in range(3):
            cost.observe(4, 0, 1.5 * RUNGS[4])
        assert cost.in_doubt(4) and not cost.in_doubt(8)
        for _ in range(30):
            cost.observe(4, 0, 1.5 * RUNGS[4])
        assert not cost.in_doubt(4)

    @pytest.mark.parametrize("news", [(4, 0.0), (4, -1.0), (100, 1e-3)])
    def test_what_is_no_news_changes_nothing(self, news: tuple[int, float]) -> None:
        cost = target()
        before = cost.figures()
        for _ in range(20):
            cost.observe(news[0], 0, news[1])
        assert cost.figures() == before


class TestDraft:
    def test_straight_lines_in_both_directions(self) -> None:
        cost = DraftCost(GRID)
        assert [cost.seconds(*key) for key in GRID] == pytest.approx(list(GRID.values()))
        assert cost.seconds(3, 1) == pytest.approx(2e-3)
        assert cost.seconds(1, 8) < cost.seconds(3, 8) < cost.seconds(5, 8) < cost.seconds(5, 16) < cost.seconds(7, 16)
        assert cost.seconds(0, 4) == cost.seconds(4, 0) == 0.0

    def test_a_lasting_change_is_followed_and_expected_elsewhere(self) -> None:
        cost = DraftCost(GRID)
        for _ in range(80):
            cost.observe(3, 1, 5e-3)
        assert cost.seconds(3, 1) == pytest.approx(5e-3, rel=0.1)
        assert cost.seconds(5, 8) > GRID[5, 8]

    def test_one_outlier_weighs_little(self) -> None:
        cost = DraftCost(GRID)
        cost.observe(5, 1, 10.0)
        assert cost.seconds(5, 1) < 1.1 * GRID[5, 1]

    def test_unmeasured_drafting_is_free_until_it_was_seen(self) -> None:
        cost = DraftCost()
        assert cost.seconds(5, 3) == 0.0
        cost.observe(2, 1, 1e-3)
        assert cost.seconds(2, 1) == pytest.approx(1e-3)
        assert cost.seconds(4, 1) >= 1e-3, "deeper is no cheaper"
        for nothing in ((2, 1, 0.0), (2, 1, -1.0), (0, 1, 1.0), (1, 0, 1.0)):
            cost.observe(*nothing)
        assert cost.seconds(2, 1) == pytest.approx(1e-3)


class TestTable:
    def test_figures_come_back(self) -> None:
        known = CostTable(CostFigures(RUNGS, 1e-6, {"ngram": GRID}), ["prediction", "ngram"], 64)
        for _ in range(30):
            known.target.observe(8, 100, 30e-3)
            known.drafts[1].observe(5, 1, 4e-3)
        figures = known.figures()
        assert set(figures.target) == {n for n in LADDER if n <= 64} and set(figures.draft or {}) == {"ngram"}
        again = CostTable(figures, ["prediction", "ngram"], 64)
        for tokens in (1, 4, 8, 9, 16, 64):
            assert again.target.seconds(tokens, 500) == pytest.approx(known.target.seconds(tokens, 500))
        for cell in GRID:
            assert again.drafts[1].seconds(*cell) == pytest.approx(known.drafts[1].seconds(*cell))
        assert again.drafts[0].seconds(3, 3) == 0.0

    def test_passes_are_learnt_apart_from_steps(self) -> None:
        known = CostTable(CostFigures(RUNGS, passes={tokens: seconds / 2 for tokens, seconds in RUNGS.items()}), [], 64)
        assert known.passes.seconds(8) == pytest.approx(known.target.seconds(8) / 2)
        for _ in range(50):
            known.passes.observe(8, 0, RUNGS[8] / 3)
        figures = known.figures()
        assert figures.passes is not None and figures.passes[8] < 0.4 * RUNGS[8] and figures.target[8] == pytest.approx(RUNGS[8], rel=0.15)
        assert CostTable(CostFigures(RUNGS), [], 64).figures().passes is None

    def test_a_machine_that_slows_down_does_so_for_passes_and_steps_alike(self) -> None:
        """Else rounds, which are all that is seen while they pay, would be compared with plain steps of a faster machine."""
        known = CostTable(CostFigures(RUNGS, passes={tokens: seconds / 2 for tokens, seconds in RUNGS.items()}), [], 64)
        before = CostTable(CostFigures(RUNGS), [], 64).target.seconds
        for i in range(400):
            tokens = 1 + i * 7 % 16
            known.passes.observe(tokens, 0, 1.5 * before(tokens) / 2)
        assert 1.25 * before(1) < known.target.seconds(1) < 1.55 * before(1)

    def test_a_start_with_fewer_tokens_a_step_loses_only_the_wide_ones(self) -> None:
        figures = CostTable(CostFigures(RUNGS), [], 4).figures()
        assert set(figures.target) == {1, 2, 3, 4} and figures.target[4] == RUNGS[4]

    @pytest.mark.parametrize(
        "make",
        [
            lambda: CostFigures({}),
            lambda: CostFigures({1: 0.0}),
            lambda: CostFigures({0: 1e-3}),
            lambda: CostFigures({1: math.nan}),
            lambda: CostFigures({1: -1e-3}),
            lambda: CostFigures({1: 1e-3}, passes={1: 0.0}),
            lambda: CostFigures({1: 1e-3}, passes={1: math.inf}),
            lambda: CostFigures({1: 1e-3}, math.inf),
            lambda: CostFigures({1: 1e-3}, -1e-9),
            lambda: CostFigures({1: 1e-3}, 0.0, {"p": {(1, 1): math.nan}}),
        ],
    )
    def test_what_can_be_no_cost_is_refused(self, make: Callable[[], CostFigures]) -> None:
        with pytest.raises(ValueError):
            make()
