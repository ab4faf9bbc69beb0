"""Estimates of what guesses are worth: from the proposer's average to the row's own, and along with it when it changes."""

import random

import pytest

from foretoken.engine.policy.acceptance import Calibration, ProposerAcceptance, Worth


class Row:
    """Chains of one row, of which every guess is kept with the same chance."""

    def __init__(self, of: ProposerAcceptance, name: str, seed: int = 0) -> None:
        self.of, self.name, self.dice = of, name, random.Random(seed)
        self.step = 0

    def draft(self, chance: float, times: int = 1, wanted: int | None = None, made: int | None = None) -> Worth:
        wanted = self.of.depth if wanted is None else wanted
        made = wanted if made is None else made
        for _ in range(times):
            kept = 0
            while kept < made and self.dice.random() < chance:
                kept += 1
            self.step += 1
            self.of.observe(self.name, wanted, made, made, range(kept), True, self.step)
        return self.of.worth(self.name)


def test_an_unknown_proposer_is_hoped_of() -> None:
    worth = ProposerAcceptance(4).worth("r")
    assert worth.made == pytest.approx([1.0] * 4)
    assert 0.3 < worth.accepted[0] < 1 and list(worth.accepted) == sorted(worth.accepted, reverse=True)


def test_a_row_starts_from_its_proposers_average() -> None:
    acceptance = ProposerAcceptance(4)
    Row(acceptance, "old").draft(0.3, 200)
    assert acceptance.worth("new") == acceptance.expected()
    assert acceptance.expected().accepted[0] == pytest.approx(0.3, abs=0.1)
    assert acceptance.last_step("new") == -1 and acceptance.last_step("old") == 200


def test_and_leaves_it_with_evidence_of_its_own() -> None:
    acceptance = ProposerAcceptance(4)
    Row(acceptance, "bad").draft(0.2, 200)
    good = Row(acceptance, "good")
    before = acceptance.worth("good").accepted[0]
    chances = [good.draft(1.0).accepted[0] for _ in range(20)]
    assert before < chances[0] < chances[5] < chances[-1] and chances[-1] > before + 0.3
    assert acceptance.worth("bad").accepted[0] < 0.35, "the other row is no better for that"


@pytest.mark.parametrize("chance", [0.0, 0.5, 0.8, 1.0])
def test_the_chance_is_found_at_every_depth(chance: float) -> None:
    acceptance = ProposerAcceptance(5)
    worth = Row(acceptance, "r", seed=3).draft(chance, 400)
    for depth in range(5):
        assert worth.accepted[depth] == pytest.approx(chance ** (depth + 1), abs=0.15)


def test_depths_differ() -> None:
    acceptance = ProposerAcceptance(3)
    for step in range(100):
        acceptance.observe("r", 3, 3, 3, (0, 1), True, step)  # the third is always wrong
    accepted = acceptance.worth("r").accepted
    assert accepted[1] > 0.8 and accepted[2] < 0.2


def test_what_a_row_is_better_at_is_expected_deeper_too() -> None:
    acceptance = ProposerAcceptance(4)
    Row(acceptance, "many", seed=1).draft(0.5, 200)
    worth = Row(acceptance, "short").draft(1.0, 15, wanted=1)
    average = acceptance.expected()
    assert worth.accepted[1] / worth.accepted[0] > average.accepted[1] / average.accepted[0]


def test_a_change_in_mid_request_is_followed() -> None:
    acceptance = ProposerAcceptance(4)
    row = Row(acceptance, "r")
    for chance in (0.95, 0.1, 0.95):
        worth = row.draft(chance, 60)
        assert worth.accepted[0] == pytest.approx(chance, abs=0.2)


def test_evidence_fades_while_a_row_has_no_draft_but_not_to_nothing() -> None:
    acceptance = ProposerAcceptance(4)
    Row(acceptance, "bad", seed=1).draft(0.1, 300)
    rested, busy = Row(acceptance, "rested"), Row(acceptance, "busy")
    for row in (rested, busy):
        row.draft(1.0, 40)
    rested.step += 1000
    after_rest, after_none = rested.draft(0.0).accepted[0], busy.draft(0.0).accepted[0]
    assert after_rest < after_none - 0.05, "a rested row leaves its old opinion sooner"
    assert after_rest > 0.6, "but not for one draft"


def test_guesses_that_are_not_made_are_not_expected() -> None:
    acceptance = ProposerAcceptance(4)
    row = Row(acceptance, "r")
    worth = row.draft(1.0, 100, wanted=4, made=2)
    assert worth.made[1] > 0.9 and worth.made[2] < 0.2
    assert worth.accepted[1] > 0.8 and worth.accepted[2] < 0.2, "what is not made is not kept"
    for step in range(100):
        acceptance.observe("empty", 4, 0, 0, (), True, step)
    assert acceptance.worth("empty").made[0] < 0.3 and acceptance.worth("empty").accepted[0] < 0.3
    assert acceptance.worth("r").made[0] > 0.7


def test_what_was_cut_from_a_draft_is_no_evidence_against_it() -> None:
    acceptance = ProposerAcceptance(4)
    for step in range(50):
        acceptance.observe("r", 4, 4, 1, (0,), True, step)  # made 4, verified 1
    worth = acceptance.worth("r")
    assert worth.made[3] > 0.9 and worth.accepted[0] > 0.9
    assert worth.accepted[3] > 0.2, "nobody has seen the deeper ones fail"


def test_the_number_of_drafts_seen_grows_to_a_bound() -> None:
    acceptance = ProposerAcceptance(2)
    assert acceptance.num_seen == 0.0
    row = Row(acceptance, "r")
    row.draft(0.5, 10)
    assert 8 < acceptance.num_seen <= 10
    row.draft(0.5, 3000)
    assert 20 < acceptance.num_seen < 1000
    assert ProposerAcceptance(0).num_seen == 0.0 and not ProposerAcceptance(0).expected().accepted


def test_forgotten_rows_start_anew() -> None:
    acceptance = ProposerAcceptance(3)
    Row(acceptance, "r").draft(0.0, 50)
    Row(acceptance, "s").draft(1.0, 500)
    acceptance.forget("r")
    acceptance.forget("r")
    assert acceptance.worth("r") == acceptance.expected() and acceptance.last_step("r") == -1


def test_nodes_of_a_tree_are_worth_what_they_are_each() -> None:
    acceptance = ProposerAcceptance(4)
    for step in range(200):  # two children of the root, each with one of its own: the second branch is right more often
        acceptance.observe("r", 4, 4, 4, (1, 3) if step % 4 else (0,), False, step)
    assert acceptance.shape.branches
    first, second, of_first, of_second = acceptance.worth("r").accepted
    assert second == pytest.approx(0.75, abs=0.15) and first == pytest.approx(0.25, abs=0.15)
    assert of_first < 0.1 and of_second == pytest.approx(0.75, abs=0.15), "a later node may be worth more than an earlier one"


class TestCalibration:
    def test_the_drafters_word_counts_until_it_was_tried(self) -> None:
        calibration = Calibration()
        assert [calibration.chance(c) for c in (0.0, 0.35, 1.0)] == pytest.approx([0.0, 0.35, 1.0])

    @pytest.mark.parametrize(("said", "true"), [(0.95, 0.5), (0.35, 0.8), (1.0, 0.7)])
    def test_it_is_worth_what_became_of_it(self, said: float, true: float) -> None:
        calibration, dice = Calibration(), random.Random(1)
        for _ in range(500):
            calibration.observe(said, dice.random() < true)
        assert calibration.chance(said) == pytest.approx(true, abs=0.1)

    def test_what_it_was_not_so_sure_of_is_another_matter(self) -> None:
        calibration = Calibration()
        for _ in range(200):
            calibration.observe(0.95, False)
        assert calibration.chance(0.95) < 0.1 and calibration.chance(0.45) == pytest.approx(0.45)

    def test_a_drafter_that_gets_better_is_believed_again(self) -> None:
        calibration = Calibration()
        for _ in range(300):
            calibration.observe(0.9, False)
        for _ in range(600):
            calibration.observe(0.9, True)
        assert calibration.chance(0.9) > 0.85
