"""Scouts: proposers that say before every step whether they have a guess. Whole worlds with them are in test_controller_simulation.py."""

from array import array
from collections.abc import Sequence

import pytest
from rows import a_request

from foretoken.engine.controller import Controller
from foretoken.engine.plan import PlanRow, RowGrant, RowVerdict, StepPlan, Verdict
from foretoken.engine.policy.adaptive import AdaptivePolicy
from foretoken.engine.policy.base import ProposerInfo, StepTimes, Wish
from foretoken.engine.policy.costs import LADDER, CostFigures, CostTable
from foretoken.engine.policy.expectations import Asked
from foretoken.engine.request import Request
from foretoken.proposers.base import Draft, KnownRow
from foretoken.proposers.config import SpeculativeConfig

MS = 1e-3
K = 4


class Text:
    """One row whose text repeats itself when it is told to, and a controller with prompt lookup alone."""

    def __init__(self, step_s: float) -> None:
        self.request: Request = a_request("r", max_tokens=10_000)
        self.repeats = False
        self.num_looks = 0
        self.step_s = step_s
        draft = {"ngram": {(k, rows): 0.01 * step_s for k in (1, K) for rows in (1, 8)}}
        costs = CostTable(CostFigures({tokens: step_s * (1 + 0.1 * tokens) for tokens in LADDER}, 0.0, draft), ("ngram",), 64)
        self.controller = Controller(SpeculativeConfig(), (ProposerInfo("ngram", K, self._have_guesses),), costs)
        self.request.num_computed_tokens = len(self.request.token_ids) - 1

    def _have_guesses(self, rows: Sequence[KnownRow]) -> list[bool]:
        self.num_looks += len(rows)
        return [self.repeats for _ in rows]

    def step(self, is_right: bool = True, budget: int = 64, has_begun: bool = False, most_made: int = K) -> int:
        """Returns how many guesses were asked for, of which most_made come at most."""
        request = self.request
        self.controller.look([request], has_begun)
        limits = self.controller.limits(1)
        (_, k), = self.controller.share([Wish(request, 1, min(K, limits.max_tokens))], limits, budget)
        made = min(k, most_made)
        draft, parents = [5] * made, list(range(-1, made - 1))
        grant = RowGrant(request, request.num_computed_tokens, 1, k, 0, array("i"), ())
        kept = self.controller.cut([grant], Draft(draft, [0, made], parents, [0] * made))
        made = made if kept is None else kept[0]
        row = PlanRow(request, request.num_computed_tokens, 1, draft[:made], parents[:made], [0] * made, [0], samples=True)
        said = RowVerdict(list(range(made if is_right else 0)), [5] * ((made if is_right else 0) + 1))
        request.token_ids += said.token_ids
        request.num_computed_tokens = len(request.token_ids) - 1
        seconds = self.step_s * (1 + 0.1 * row.num_tokens)
        self.controller.observe(StepPlan([row], 16), Verdict([said]), 0.0, StepTimes(seconds, (0.01 * self.step_s * bool(k),)))
        return k


def test_guesses_come_with_the_first_repetition_and_go_with_it() -> None:
    text = Text(10 * MS)
    assert [text.step() for _ in range(20)] == [0] * 20
    text.repeats = True
    assert text.step() > 0 and text.step() > 0
    text.repeats = False
    assert text.step() == 0
    text.repeats = True
    assert text.step() > 0


def test_where_nothing_is_ever_found_one_looks_more_rarely() -> None:
    """A step of a third of a millisecond: to look takes some hundredths of it."""
    text = Text(0.3 * MS)
    for _ in range(40):
        text.step()
    text.num_looks = 0
    for _ in range(200):
        assert text.step() == 0
    assert 20 <= text.num_looks <= 40
    text.repeats = True
    assert any(text.step() for _ in range(10))


def test_wrong_guesses_are_given_up_but_for_a_try_now_and_then_and_right_ones_taken_up_again() -> None:
    text = Text(10 * MS)
    text.repeats = True
    for _ in range(300):
        text.step(is_right=False)
    guesses = [text.step(is_right=False) for _ in range(500)]
    assert 0 < sum(map(bool, guesses)) <= 40
    for _ in range(300):
        text.step()
    assert all(text.step() for _ in range(20))


def test_decisions_that_stand_keep_to_the_budget_of_the_step() -> None:
    """Steps so short that a decision stands for some: the next step has room for fewer guesses."""
    text = Text(0.3 * MS)
    text.repeats = True
    assert any(text.step(budget=64) == K for _ in range(20))
    assert [text.step(budget=2) for _ in range(3)] == [2, 2, 2]


def test_to_look_and_find_nothing_is_not_to_be_off() -> None:
    text = Text(10 * MS)
    for _ in range(10):
        assert text.step() == 0
    assert text.controller.latest.off is None


def test_what_is_found_while_a_plain_step_is_under_way_is_left_for_the_next() -> None:
    text = Text(10 * MS)
    for _ in range(20):
        assert text.step(has_begun=True) == 0 and not text.controller.policy.has_left
    text.repeats = True
    assert text.step(has_begun=True) == 0 and text.controller.policy.has_left
    assert text.step() > 0 and not text.controller.policy.has_left


def test_what_is_found_while_a_step_with_guesses_is_under_way_is_left_too() -> None:
    """Beside a drafter that is asked in every step: what it guesses has begun, and other guesses would be another step."""
    request = a_request("r", max_tokens=10_000)
    request.num_computed_tokens = len(request.token_ids) - 1
    repeats = False
    draft = {name: {(k, rows): 1e-5 for k in (1, K) for rows in (1, 8)} for name in ("draft", "ngram")}
    costs = CostTable(CostFigures({tokens: 10 * MS * (1 + 0.02 * tokens) for tokens in LADDER}, 0.0, draft), ("draft", "ngram"), 64)
    infos = (ProposerInfo("draft", K), ProposerInfo("ngram", 2 * K, lambda rows: [repeats for _ in rows]))
    controller = Controller(SpeculativeConfig(), infos, costs)

    def step(has_begun: bool) -> tuple[int, int]:
        controller.look([request], has_begun)
        limits = controller.limits(1)
        ((proposer, k),) = controller.share([Wish(request, 1, min(2 * K, limits.max_tokens))], limits, 64)
        tokens, parents = [5] * k, list(range(-1, k - 1))
        row = PlanRow(request, request.num_computed_tokens, 1, tokens, parents, [proposer] * k, [0], samples=True)
        said = RowVerdict(list(range(k)) if proposer else list(range(k // 2)), [5] * (1 + (k if proposer else k // 2)))
        request.token_ids += said.token_ids
        request.num_computed_tokens = len(request.token_ids) - 1
        seconds = 10 * MS * (1 + 0.02 * row.num_tokens)
        controller.observe(StepPlan([row], 16), Verdict([said]), 0.0, StepTimes(seconds, (1e-5 * (not proposer), 1e-5 * (proposer == 1))))
        return proposer, k

    # Nobody guessed in the step before: to ask for the first time is another step, too.
    assert step(has_begun=True) == (-1, 0) and controller.policy.has_left
    asked = [step(has_begun=False)[0] for _ in range(60)]
    assert asked[-10:] == [0] * 10 and not controller.policy.has_left
    assert [step(has_begun=True)[0] for _ in range(4)] == [0] * 4 and not controller.policy.has_left
    repeats = True
    left = [(step(has_begun=True)[0], controller.policy.has_left) for _ in range(6)]
    assert {who for who, _ in left} == {0} and any(has_left for _, has_left in left)
    assert [step(has_begun=False)[0] for _ in range(3)].count(1) >= 2 and not controller.policy.has_left


def test_a_step_learns_what_came_in_it_whatever_came_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps so short that a decision stands for some, and one asks for the same: what they teach is put off."""
    text = Text(0.3 * MS)
    text.repeats = True
    assert isinstance(policy := text.controller.policy, AdaptivePolicy)
    came: dict[int, int] = {}  # guesses, by step
    learnt: dict[int, int] = {}
    learn = policy.expectations.learn

    def learn_and_tell(asked: Asked, row: PlanRow, said: RowVerdict, step: int) -> int:
        learnt[step] = len(row.draft_token_ids) if asked.made is None else asked.made
        return learn(asked, row, said, step)

    monkeypatch.setattr(policy.expectations, "learn", learn_and_tell)
    for step in range(1, 200):
        most_made = 1 if step % 3 == 0 else K
        came[step] = min(text.step(most_made=most_made), most_made)
    assert len(learnt) > 50 and learnt == {step: came[step] for step in learnt}
