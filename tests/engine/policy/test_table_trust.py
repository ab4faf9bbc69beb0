"""How far a table's own chances are believed."""

import pytest

from foretoken.engine.policy.table_trust import TableTrust


def teach(trust: TableTrust, request_id: str, expected: float, accepted: float, steps: int = 60) -> None:
    for _ in range(steps):
        trust.step()
        trust.observe(request_id, expected, accepted)


def test_a_table_is_taken_at_its_word_until_something_speaks_against_it() -> None:
    trust = TableTrust()
    assert trust.of("r") == 1.0
    teach(trust, "r", 3.0, 3.0)
    assert trust.of("r") == trust.of("new") == 1.0
    trust.step()
    trust.observe("r", 4.0, 0.0)
    assert 0.8 < trust.of("r") < 1.0, "one step proves little"


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 1.4])
def test_it_is_worth_the_share_that_is_kept(share: float) -> None:
    trust = TableTrust()
    teach(trust, "r", 2.0, 2.0 * share)
    assert trust.of("r") == pytest.approx(share, abs=0.12)
    assert trust.of("new") == pytest.approx(share, abs=0.2), "others may expect about the same"


def test_a_row_is_judged_by_its_own_drafts_more_than_by_those_of_others() -> None:
    trust = TableTrust()
    for _ in range(80):
        trust.step()
        trust.observe("good", 2.0, 2.0)
        trust.observe("bad", 2.0, 0.2)
    assert trust.of("bad") < 0.3 < trust.of("new") < 0.8 < trust.of("good") <= 1.0


def test_it_is_never_nothing_and_what_is_refused_is_trusted_again() -> None:
    """Nothing is learnt of guesses that nobody makes, so what is known of them fades."""
    trust = TableTrust()
    teach(trust, "r", 8.0, 0.0, 1000)
    lowest = trust.of("new")
    assert 0 < trust.of("r") < lowest < 0.05
    values: list[tuple[float, float]] = []
    for _ in range(400):
        trust.step()
        values.append((trust.of("new"), trust.of("r")))
    assert values == sorted(values) and values[-1][0] > 0.9, "little by little"
    assert values[-1][1] > values[0][1], "a row of its own with the others"


def test_rows_that_are_gone_leave_nothing_but_what_they_taught() -> None:
    trust = TableTrust()
    teach(trust, "r", 2.0, 0.5)
    assert trust.of("r") < trust.of("new")
    trust.forget("r")
    trust.forget("never seen")
    assert trust.of("r") == trust.of("new") < 0.6 and not trust._rows


def test_drafts_of_which_nothing_was_expected_say_nothing() -> None:
    trust = TableTrust()
    teach(trust, "r", 0.0, 0.0)
    assert trust.of("r") == 1.0
