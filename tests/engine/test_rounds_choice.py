"""How many rounds a step has, and how much is looked up in one."""

from __future__ import annotations

from rows import a_request

from foretoken.engine.assignment import Assignment
from foretoken.engine.costs import LADDER, CostFigures, CostTable
from foretoken.engine.expectations import Expectations
from foretoken.engine.plan import RoundsPlan, RoundsVerdict, RowRounds, RowSaid, Settled
from foretoken.engine.request import Request
from foretoken.engine.rounds_choice import FEWEST_ROUNDS, MOST_ROUNDS, RETRY_EVERY, STEP_S, TRIED, TRY_EVERY, RoundsChoice
from foretoken.engine.speculation_policy import ProposerInfo, RequestLimits
from foretoken.proposers.base import KnownRow
from foretoken.proposers.config import SpeculativeConfig

MS = 1e-3
PREDICTION, TEXT, K = 0, 1, 8


def has_guess(row: KnownRow) -> bool:
    return True


class World:
    """Passes of a told cost, and rows of a told acceptance."""

    def __init__(self, pass_s: float, token_s: float = 0.0) -> None:
        names = ("prediction", "ngram")
        self.costs = CostTable(
            CostFigures({1: 1.0}, passes={tokens: pass_s + token_s * (tokens - 1) for tokens in LADDER if tokens <= 64}), names, 64
        )
        infos = [ProposerInfo("prediction", K, has_guess), ProposerInfo("ngram", K, has_guess, reads_text=True)]
        rules = RequestLimits(SpeculativeConfig(), infos)
        assert (rules.prediction, rules.text_lookup) == (PREDICTION, TEXT)
        self.expectations = Expectations([K, K])
        acceptance = self.expectations.acceptance
        self.choice = RoundsChoice(Assignment(rules, acceptance, self.costs), acceptance, self.costs.passes, PREDICTION, TEXT)

    def teach(self, accepted: int, proposer: int = TEXT, request_id: str = "r") -> None:
        for step in range(60):
            self.expectations.acceptance[proposer].observe(request_id, K, K, K, range(accepted), True, step)

    def depths(self, *requests: Request, most: int = K) -> list[tuple[int, int]] | None:
        asked = self.choice.ask(requests, 4, most)
        return None if asked is None else asked.depths


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
    assert world.choice.rate([request]) == 0.0
    plan = RoundsPlan([RowRounds(request, 3, 64, 20, request.token_ids, 0, 4)], 4, STEP_S, False)  # type: ignore[arg-type]
    said = RowSaid([7] * 8, [Settled(TEXT, 0, 4, 4), Settled(TEXT, 5, 4, 2)])
    for step in range(200):
        world.choice.ask([request], 4, K)
        world.choice.observe(plan, RoundsVerdict([said], [5, 5, 1], [9 * MS, 2 * MS, 3 * MS]), 10 * MS, step)
    passes = world.costs.passes
    assert abs(passes.seconds(5) - 2 * MS) < 0.6 * MS and passes.seconds(1) > 1.5 * MS, "the first pass finds cold caches"
    assert abs(world.choice.rate([request]) - 800) < 1 and world.choice.rate([request] * 2) == 0.0
    chances = world.expectations.acceptance[TEXT].worth("r").chances
    assert chances[1] > 0.9 and 0.3 < chances[3] < 0.7
