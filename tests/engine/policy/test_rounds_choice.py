"""How many rounds a step has, and how much is looked up in one."""

import math
from array import array
from collections.abc import Sequence

import pytest
from rows import a_request

from foretoken.engine.plan import SURE_OF, RoundsPlan, RoundsVerdict, RowLookups, RowRounds, RowSaid, Settled
from foretoken.engine.policy.assignment import Assignment
from foretoken.engine.policy.base import ProposerInfo, RequestLimits
from foretoken.engine.policy.costs import LADDER, CostFigures, CostTable
from foretoken.engine.policy.expectations import Expectations
from foretoken.engine.policy.rounds_choice import FEWEST_ROUNDS, MOST_ROUNDS, RETRY_EVERY, STEP_S, TRIED, TRY_EVERY, RoundsChoice
from foretoken.engine.request import Request
from foretoken.proposers.base import KnownRow
from foretoken.proposers.config import SpeculativeConfig

MS = 1e-3
PREDICTION, TEXT, TABLE, K = 0, 1, 2, 8


def have_guesses(rows: Sequence[KnownRow]) -> list[bool]:
    return [True for _ in rows]


class World:
    """Passes of a told cost, and rows of a told acceptance."""

    def __init__(self, pass_s: float, token_s: float = 0.0, has_table: bool = False, stairs: float = 0.0) -> None:
        """stairs: that a pass of 2 or 3 tokens takes longer than one of 1, one of 4 or 5 than one of 3, ..."""
        infos = [ProposerInfo("prediction", K, have_guesses), ProposerInfo("ngram", K, have_guesses, "text")]
        infos += [ProposerInfo("ngram_cache", K, None, "table")] * has_table
        self.costs = CostTable(
            CostFigures({1: 1.0}, passes={t: pass_s + token_s * (t - 1) + stairs * (t // 2) for t in LADDER if t <= 64}),
            [info.name for info in infos],
            64,
        )
        rules = RequestLimits(SpeculativeConfig(), infos)
        assert (rules.prediction, rules.text_lookup, rules.table_lookup) == (PREDICTION, TEXT, TABLE if has_table else -1)
        self.expectations = Expectations(rules)
        acceptance = self.expectations.acceptance
        self.choice = RoundsChoice(Assignment(rules, acceptance, self.costs), acceptance, self.costs.passes, rules)

    def teach(self, accepted: int, proposer: int = TEXT, request_id: str = "r") -> None:
        for step in range(60):
            self.expectations.acceptance[proposer].observe(request_id, K, K, K, range(accepted), True, step)

    def asked(self, *requests: Request, most: int = K) -> list[RowLookups]:
        asked = self.choice.ask(requests, most)
        assert asked is not None
        return asked.lookups

    def prices(self, *requests: Request) -> list[float]:
        asked = self.choice.ask(requests, K)
        assert asked is not None
        return [*asked.prices]

    def depths(self, *requests: Request, most: int = K) -> list[tuple[int, int]] | None:
        """From the prediction and from the text."""
        asked = self.choice.ask(requests, most)
        return None if asked is None else [(lookups.predicted_k, lookups.text_k) for lookups in asked.lookups]

    def spend(self, request: Request, drafts: list[Settled], num_tokens: int = 8, seconds: float = 10 * MS, steps: int = 1) -> None:
        """Steps in rounds of one row, all with the same drafts."""
        plan = RoundsPlan([RowRounds(request, 3, 64, 20, array("i"), RowLookups())], 4, STEP_S, False)
        for step in range(steps):
            self.choice.observe(plan, RoundsVerdict([RowSaid([7] * num_tokens, drafts)], [1], [1 * MS]), seconds, step)


def test_rounds_fill_the_time_that_a_step_may_take() -> None:
    request = a_request("r")
    assert World(STEP_S / 100).choice.most_rounds([request]) == MOST_ROUNDS
    assert World(STEP_S / 4.5).choice.most_rounds([request]) == 4
    assert World(STEP_S / 1.5).choice.most_rounds([request]) == 0, "a step of one round is an ordinary one"
    world = World(STEP_S / 10, token_s=STEP_S / 10)
    assert [world.choice.most_rounds([request] * rows) for rows in (1, 3, 6)] == [10, 3, 0]


def test_what_is_a_little_too_long_is_tried_again() -> None:
    """A machine that was slow for a while must not be without rounds for ever."""
    request = a_request("r")
    for times, expected in ((1.5, 2), (5.0, 0)):
        choice = World(times * STEP_S / FEWEST_ROUNDS).choice
        rounds = [choice.most_rounds([request]) for _ in range(2 * RETRY_EVERY)]
        assert sum(most > 0 for most in rounds) == expected and set(rounds) <= {0, FEWEST_ROUNDS}


def test_what_is_kept_is_guessed_and_no_more() -> None:
    for accepted in (2, 5, 8):
        world = World(1 * MS, token_s=0.2 * MS)
        world.teach(accepted)
        assert world.depths(a_request("r")) == [(0, accepted)]
    cheap = World(1 * MS)
    cheap.teach(1)
    (depths,) = cheap.depths(a_request("r")) or []
    assert depths[1] >= 1


def test_where_tokens_cost_what_they_bring_nothing_is_guessed_but_tried_now_and_then() -> None:
    world = World(0.1 * MS, token_s=0.1 * MS)
    world.teach(1)
    asked = [world.depths(a_request("r")) for _ in range(2 * TRY_EVERY)]
    assert sorted(asked, key=str) == [[(0, 0)]] * (2 * TRY_EVERY - 2) + [[(0, TRIED)]] * 2


def test_a_prediction_counts_only_where_there_is_one() -> None:
    world = World(1 * MS)
    world.teach(K, PREDICTION)
    world.teach(3)
    request = a_request("r")
    request.prediction = [1, 2, 3]
    with_prediction, without = (world.depths(one) or [] for one in (request, a_request("r")))
    assert with_prediction[0][0] == K and without[0][0] == 0 and with_prediction[0][1] == without[0][1] > 0


def test_the_step_limits_each_row() -> None:
    world = World(1 * MS)
    world.teach(K)
    assert world.depths(a_request("r"), most=3) == [(0, 3)]


def test_rows_that_want_none_ride_along_and_alone_take_ordinary_steps() -> None:
    world = World(1 * MS)
    world.teach(K)
    off = a_request("off", speculation={"method": "off"})
    assert world.depths(off) is None
    assert world.depths(off, a_request("r")) == [(0, 0), (0, K)]


def test_it_learns_what_passes_take_what_is_kept_and_what_rounds_bring() -> None:
    world = World(1 * MS, token_s=0.1 * MS)
    request = a_request("r")
    assert world.choice.rate([request]) is None
    plan = RoundsPlan([RowRounds(request, 3, 64, 20, array("i"), RowLookups(text_k=4))], 4, STEP_S, False)
    said = RowSaid([7] * 8, [Settled(TEXT, 0, 4, 4), Settled(TEXT, 5, 4, 2)])
    for step in range(200):
        world.choice.ask([request], K)
        world.choice.observe(plan, RoundsVerdict([said], [5, 5, 1], [9 * MS, 2 * MS, 3 * MS]), 10 * MS, step)
    passes = world.costs.passes
    assert abs(passes.seconds(5) - 2 * MS) < 0.6 * MS and passes.seconds(1) > 1.5 * MS, "the first pass finds cold caches"
    assert world.choice.rate([request]) == pytest.approx(800, abs=1) and world.choice.rate([request] * 2) is None
    chances = world.expectations.acceptance[TEXT].worth("r").chances
    assert chances[1] > 0.9 and 0.3 < chances[3] < 0.7


def test_without_a_table_nobody_looks_in_one() -> None:
    world = World(1 * MS)
    world.teach(3)
    assert [lookups.table_k for lookups in world.asked(a_request("r"), a_request("s"))] == [0, 0]


def test_a_table_may_guess_as_much_as_it_likes_where_that_costs_nothing() -> None:
    (lookups,) = World(1 * MS, has_table=True).asked(a_request("r"))
    assert (lookups.table_k, lookups.trust) == (K, 1.0)
    assert lookups.k == K, "of the text"


@pytest.mark.parametrize("num_rows", [1, 4])
def test_guesses_cost_what_passes_bring_in_the_time_that_theirs_takes_longer(num_rows: int) -> None:
    rows = [a_request(f"r{i}") for i in range(num_rows)]
    for token_s in (0.01 * MS, 0.1 * MS, 0.5 * MS):
        world = World(1 * MS, token_s, has_table=True)
        plain_s = 1 * MS + (num_rows - 1) * token_s
        assert world.prices(*rows) == pytest.approx([k * token_s * num_rows / plain_s for k in range(K + 1)], rel=0.02)


def test_where_tokens_come_faster_a_guess_must_bring_more() -> None:
    """A pass that is longer keeps the others waiting. What happens between calls is no part of it: guesses make that no longer."""
    first: list[float] = []
    for num_tokens in (5, 10, 40):
        world = World(1 * MS, token_s=0.1 * MS, has_table=True)
        request = a_request("r")
        world.spend(request, [], num_tokens, 10 * MS)
        assert world.prices(request)[1] == pytest.approx(num_tokens / (1 * MS) * 0.1 * MS, rel=0.05), "of the 10 ms 1 was a pass"
        first.append(world.prices(request)[1])
    assert first == sorted(first)


def test_a_pass_whose_cost_has_steps_is_filled_to_the_next_one() -> None:
    world = World(1 * MS, has_table=True, stairs=2 * MS)
    assert world.prices(a_request("r"))[:4] == pytest.approx([0.0, 2.0, 2.0, 4.0], rel=0.02)


def test_a_table_that_promises_too_much_is_believed_less() -> None:
    world = World(1 * MS, token_s=0.1 * MS, has_table=True)
    world.teach(3)
    request, other = a_request("r"), a_request("other")
    (before,) = world.asked(request)
    chances = world.expectations.acceptance[TEXT].worth("r").chances
    assert before.text_gain == pytest.approx(sum(chances[: before.text_k]) - world.prices(request)[before.text_k])
    world.spend(request, [Settled(TABLE, 0, 4, 1, 3.0), Settled(TEXT, 4, 3, 3)], 10, 10 * MS, steps=60)
    mine, others = world.asked(request, other)
    assert mine.trust < before.trust / 2
    assert mine.trust < others.trust < before.trust, "others learn from it, but not all"
    world.choice.forget("r")
    (again, _) = world.asked(request, other)
    assert again.trust == pytest.approx(others.trust, rel=0.05)


def test_what_is_believed_no_more_is_tried_now_and_then_and_the_text_before_the_table() -> None:
    world = World(0.1 * MS, token_s=0.1 * MS, has_table=True)
    request = a_request("r")
    world.spend(request, [Settled(TABLE, 0, 4, 0, 3.0)], 10, 10 * MS, steps=60)
    asked = [world.asked(request)[0] for _ in range(2 * TRY_EVERY)]
    tried = [lookups for lookups in asked if lookups.trust == 1.0]
    assert len(tried) == 2 and all((lookups.text_k, lookups.text_gain) == (TRIED, math.inf) for lookups in tried)
    assert all(lookups.trust < 0.2 for lookups in asked if lookups not in tried)


def test_rows_that_want_the_others_only_get_nothing_of_the_table() -> None:
    world = World(1 * MS, token_s=0.01 * MS, has_table=True)
    world.teach(3)
    rows = [a_request(name, speculation={"method": name}) for name in ("ngram", "ngram_cache", "off")]
    text, table, off = world.asked(*rows)
    assert text.text_k >= 3 and text.table_k == 0
    assert (table.text_k, table.table_k, table.text_gain) == (0, K, 0.0)
    assert off == RowLookups() and world.choice.k == pytest.approx((text.text_k + SURE_OF) / 3)
    assert world.depths(rows[-1]) is None


def test_ceilings_hold_for_the_table() -> None:
    world = World(1 * MS, has_table=True)
    few = a_request("few", speculation={"method": "auto", "num_speculative_tokens": 2})
    assert [lookups.table_k for lookups in world.asked(few, a_request("r"))] == [2, K]
    assert [lookups.table_k for lookups in world.asked(few, a_request("r"), most=1)] == [1, 1]
    assert world.choice.ask([few], 0) is None


def test_rounds_bring_nothing_to_rows_that_nothing_is_looked_up_for() -> None:
    """Else a drafter that a request asks for by name would have to beat what rounds bring to others."""
    world = World(1 * MS)
    off, auto = a_request("off", speculation={"method": "off"}), a_request("auto")
    assert world.choice.rate([off]) == 0.0 and world.choice.rate([auto]) is None
    assert world.choice.ask([off], K) is None
    assert world.choice.rate([auto]) is None, "that says nothing of others"
    world.spend(auto, [])
    assert world.choice.rate([auto]) == pytest.approx(800) and world.choice.rate([off]) == 0.0


def test_where_rounds_are_too_long_and_only_tried_again_nobody_waits_for_them() -> None:
    world = World(1.2 * STEP_S / FEWEST_ROUNDS)
    request = a_request("r")
    for _ in range(RETRY_EVERY - 1):
        assert world.choice.most_rounds([request]) == 0
    assert world.choice.most_rounds([request]) == FEWEST_ROUNDS and world.choice.rate([request]) == 0.0


def test_prices_never_fall() -> None:
    """A measured curve may dip, and guesses that seem to shorten a pass would be made for nothing."""
    world = World(1 * MS, token_s=-0.01 * MS, has_table=True)
    prices = world.prices(a_request("r"))
    assert prices == sorted(prices) and prices[0] == 0.0


def test_one_row_that_something_is_looked_up_for_is_enough_to_know(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    row_of = Assignment.row
    monkeypatch.setattr(Assignment, "row", lambda self, request: asked.append(request.request_id) or row_of(self, request))
    World(MS).choice.rate([a_request(f"r{i}") for i in range(100)])
    assert asked == ["r0"]
