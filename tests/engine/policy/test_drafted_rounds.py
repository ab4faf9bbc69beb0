"""How many rounds a step with a draft model has, what they are thought to cost, and what follows from that."""

from array import array

import pytest
from rows import a_request

from foretoken.engine.plan import (
    PlanRow,
    RoundsPlan,
    RoundsVerdict,
    RowLookups,
    RowRounds,
    RowSaid,
    RowVerdict,
    Settled,
    StepPlan,
    Verdict,
)
from foretoken.engine.policy.adaptive import AdaptivePolicy
from foretoken.engine.policy.base import ProposerInfo, RequestLimits, StepTimes, Wish
from foretoken.engine.policy.costs import LADDER, CostFigures, CostTable
from foretoken.engine.policy.drafted_rounds import DRAFTED_STEP_S, WEIGHED_ROUNDS, DraftedRounds, drafted_rounds
from foretoken.engine.policy.fixed import FixedPolicy
from foretoken.engine.policy.rounds_choice import FEWEST_ROUNDS, MOST_ROUNDS, ROUNDS_TO_A_STOP
from foretoken.engine.request import Request
from foretoken.proposers.config import SpeculativeConfig

MS = 1e-3
PREDICTION, DRAFT, K = 0, 1, 4
INFOS = (ProposerInfo("prediction", 64), ProposerInfo("draft_model", K, guesses_in_rounds=True))


def table(step_ms: float, pass_ms: float, token_ms: float, draft_ms: float) -> CostTable:
    """Of one token; of each further one; of a draft by its length and 1 ms of Python beside it."""
    tokens = [tokens for tokens in LADDER if tokens <= 64]
    target, passes = ({t: (first + token_ms * (t - 1)) * MS for t in tokens} for first in (step_ms, pass_ms))
    grid = {(k, rows): (1 + draft_ms * k) * MS for k in (1, K) for rows in (1, 8)}
    return CostTable(CostFigures(target, draft={"draft_model": grid}, passes=passes), [info.name for info in INFOS], 64)


def plan_of(rows: list[Request], k: int = K) -> RoundsPlan:
    return RoundsPlan([RowRounds(row, 3, 64, 20, array("i"), RowLookups(draft_k=k)) for row in rows], 4, DRAFTED_STEP_S, False)


def verdict_of(rows: int, num_rounds: int, pass_ms: float, draft_ms: float, accepted: int, k: int = K) -> RoundsVerdict:
    step = 1 + accepted
    drafts = [Settled(DRAFT, i * step, k, accepted) for i in range(num_rounds)]
    said = [RowSaid([7] * (num_rounds * step), drafts) for _ in range(rows)]
    return RoundsVerdict(said, [rows * (1 + k)] * num_rounds, [pass_ms * MS] * num_rounds, [draft_ms * MS] * num_rounds)


def test_rounds_fill_the_time_that_nobody_notices() -> None:
    for longest, expected in ((0.0, 3), (0.1, 11)):
        asked = drafted_rounds([a_request("r")], [K, 0], 9 * MS, longest)
        assert asked is not None and asked.most_rounds == expected and asked.most_seconds == max(longest, DRAFTED_STEP_S)
        assert asked.lookups == [RowLookups(draft_k=K), RowLookups()]
    assert drafted_rounds([], [K], DRAFTED_STEP_S / FEWEST_ROUNDS * 1.01, 0.0) is None, "one round is an ordinary step"
    asked = drafted_rounds([], [K], DRAFTED_STEP_S * 1.01, 0.0, most_at_once=16)
    assert asked is not None and asked.most_rounds == 1, "but that it has alternates"
    assert drafted_rounds([], [K], 0.0, 0.1) is None, "nobody knows yet how long one takes"
    short = drafted_rounds([], [K], DRAFTED_STEP_S / 1000, 0.0)
    assert short is not None and short.most_rounds == MOST_ROUNDS
    stopped = drafted_rounds([a_request("r", stop=["x"])], [K], 1 * MS, 0.0)
    assert stopped is not None and stopped.most_rounds == ROUNDS_TO_A_STOP


def test_fixed_k_has_rounds_once_a_step_was_timed() -> None:
    policy = FixedPolicy(RequestLimits(SpeculativeConfig(adaptive=False), INFOS))
    row = a_request("r")
    assert policy.rounds([row], K, [K]) is None
    policy.observe_rounds(plan_of([row]), verdict_of(1, 2, 8.0, 2.0, 1), 24 * MS)
    asked = policy.rounds([row], K, [K])
    assert asked is not None and asked.most_rounds == 2, "12 ms each"
    assert policy.rounds([row], K, [0]) is None, "it may guess, and cannot now"


def test_plain_rounds_are_left_to_those_who_may_not_guess() -> None:
    policy = FixedPolicy(RequestLimits(SpeculativeConfig(adaptive=False), INFOS, longest_unseen_s=0.1))
    row, off = a_request("r"), a_request("off", speculation={"method": "off"})
    policy.observe_rounds(plan_of([row]), verdict_of(1, 2, 8.0, 2.0, 1), 20 * MS)
    assert policy.rounds([row], K, [0]) is None and policy.rounds([row, off], K, [0, 0]) is None
    for rows, most in (([off], K), ([row], 0)):
        asked = policy.rounds(rows, most, [0])
        assert asked is not None and asked.most_rounds == 10 and asked.lookups == [RowLookups()]


def test_costs_are_a_passs_and_a_share_of_what_is_beside_it_and_are_learned() -> None:
    rounds = DraftedRounds(table(step_ms=5, pass_ms=4, token_ms=0.1, draft_ms=0.5), DRAFT, 0.0)
    row = a_request("r")
    costs = rounds.costs([row])
    assert costs is not None
    seconds, draft = costs
    assert seconds(3) == pytest.approx((4.2 + 1 / 6) * MS), "six rounds share a millisecond"
    assert draft.seconds(K, 1) == pytest.approx(2 * MS), "and the proposer's own is another"
    for _ in range(200):
        rounds.observe(plan_of([row]), verdict_of(1, 4, 6.0, 3.0, 1), (4 * 9 + 2) * MS)
    costs = rounds.costs([row])
    assert costs is not None
    seconds, draft = costs
    assert seconds(1 + K) == pytest.approx(6.5 * MS, rel=0.05) and draft.seconds(K, 1) == pytest.approx(3 * MS, rel=0.05)
    asked = rounds.ask([row], [K])
    assert asked is not None and asked.most_rounds == 3


def test_a_decision_stands_for_a_few_rounds() -> None:
    rounds = DraftedRounds(table(step_ms=0.3, pass_ms=0.2, token_ms=0.01, draft_ms=0.05), DRAFT, 0.1)
    asked = rounds.ask([a_request("r")], [K])
    assert asked is not None and asked.most_rounds == WEIGHED_ROUNDS < MOST_ROUNDS


def test_there_are_none_where_others_go_first() -> None:
    costs = table(step_ms=5, pass_ms=4, token_ms=0.1, draft_ms=0.5)
    predicted = a_request("p")
    predicted.prediction = [1, 2, 3]
    assert DraftedRounds(costs, DRAFT, 0.0).costs([a_request("r"), predicted]) is None
    assert DraftedRounds(costs, -1, 0.0).costs([a_request("r")]) is None


def test_alternates_have_their_price() -> None:
    row, long = a_request("r"), table(step_ms=20, pass_ms=19, token_ms=0.1, draft_ms=0.5)
    assert DraftedRounds(long, DRAFT, 0.0).costs([row]) is None and DraftedRounds(long, DRAFT, 0.0).ask([row], [K]) is None
    costs = DraftedRounds(long, DRAFT, 0.0, most_at_once=16).costs([row])
    assert costs is not None
    of_one, of_four, of_many = (costs[0](1 + k) - costs[0](1) for k in (1, 4, 19))
    assert of_one == pytest.approx(0.3 * MS) and of_four == pytest.approx(1.2 * MS) and of_many == pytest.approx(1.9 * MS)


def policy_of(costs: CostTable, accepted: int) -> AdaptivePolicy:
    """With a drafter that is known."""
    policy = AdaptivePolicy(RequestLimits(SpeculativeConfig(), INFOS), costs)
    for step in range(60):
        policy.expectations.acceptance[DRAFT].observe("r", K, K, K, range(accepted), True, step)
    return policy


def answer(policy: AdaptivePolicy, row: Request, may_round: bool) -> tuple[int, int]:
    row.num_computed_tokens = len(row.token_ids) - 1
    policy.look([row], False, may_round)
    (share,) = policy.share([Wish(row, 1, K)], 16)
    return share


def test_guesses_that_pay_in_rounds_only_are_made_there_only() -> None:
    """Of what a step of one pass takes, most is Python's."""
    costs = table(step_ms=1.6, pass_ms=1.0, token_ms=0.5, draft_ms=0.05)
    assert answer(policy_of(costs, 1), a_request("r"), may_round=False)[1] == 0
    policy, row = policy_of(costs, 1), a_request("r")
    proposer, k = answer(policy, row, may_round=True)
    assert proposer == DRAFT and k == 1
    asked = policy.rounds([row], K, [k])
    assert asked is not None and asked.lookups == [RowLookups(draft_k=1)]


def test_adaptive_k_learns_from_rounds() -> None:
    costs = table(step_ms=5, pass_ms=4, token_ms=0.1, draft_ms=0.2)
    policy, row = policy_of(costs, K), a_request("r")
    had_rounds: list[bool] = []
    for _ in range(60):
        _, k = answer(policy, row, may_round=True)
        asked = policy.rounds([row], K, [k])
        had_rounds.append(asked is not None)
        if asked is not None:
            policy.observe_rounds(plan_of([row], k), verdict_of(1, 4, 4.5, 1.0, 0, k), 23 * MS)
    assert had_rounds[0] and not any(had_rounds[-20:]), "nothing that it guessed was right"
    assert policy.expectations.acceptance[DRAFT].worth("r").accepted[0] < 0.2


def test_a_probe_is_a_step_of_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, row = policy_of(table(step_ms=5, pass_ms=4, token_ms=0.1, draft_ms=0.2), 2), a_request("r")
    _, k = answer(policy, row, may_round=True)
    assert policy.rounds([row], K, [k]) is not None
    monkeypatch.setattr(policy._probing, "probe", object())
    assert policy.rounds([row], K, [k]) is None


def test_what_rounds_promised_is_not_held_against_single_steps() -> None:
    costs = table(step_ms=5, pass_ms=4, token_ms=0.1, draft_ms=0.2)
    policy, row = policy_of(costs, 2), a_request("r")
    answer(policy, row, may_round=True)
    before = policy._balance.disappointment(5 * MS)
    plan = StepPlan([PlanRow(row, 2, 1, [5, 6], [-1, 0], [DRAFT, DRAFT], [0], True)], 16)
    policy.observe(plan, Verdict([RowVerdict([], [9])]), StepTimes(50 * MS, (0.0, 9 * MS)))
    assert policy._balance.disappointment(5 * MS) == before
