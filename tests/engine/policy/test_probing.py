"""What probes may cost: the allowance, and who is tried next."""

from rows import a_request

from foretoken.engine.plan import PlanRow, RowVerdict, StepPlan, Verdict
from foretoken.engine.policy.acceptance import ProposerAcceptance
from foretoken.engine.policy.assignment import Assignment
from foretoken.engine.policy.base import ProposerInfo, RequestLimits, Wish
from foretoken.engine.policy.costs import LADDER, CostFigures, CostTable
from foretoken.engine.policy.draft_choice import Candidate
from foretoken.engine.policy.probing import Load, Probing
from foretoken.engine.request import Request
from foretoken.proposers.config import SpeculativeConfig

MS = 1e-3


def probing() -> tuple[Probing, ProposerAcceptance]:
    costs = CostTable(CostFigures({tokens: (9 + tokens) * MS for tokens in LADDER}), ("ngram",), 64)
    acceptance = ProposerAcceptance(4)
    rules = RequestLimits(SpeculativeConfig(), (ProposerInfo("ngram", 4),))
    return Probing(Assignment(rules, [acceptance], costs), [acceptance], costs), acceptance


def tried(probing: Probing, acceptance: ProposerAcceptance, request: Request, step: int) -> int:
    """Guesses of a probe of this row, for which none were to be made."""
    depths = [0]
    probing.probe = None
    probing.try_one([Wish(request, 1, 4)], [Candidate(0, 4, acceptance.expected())], depths, Load(1, 0, 10), 16, step)
    return depths[0]


def observed(probing: Probing, request: Request, accepted: int, seconds: float) -> None:
    row = PlanRow(request, 2, 1, [5] * 3, [-1, 0, 1], [0] * 3, [0], samples=True)
    said = RowVerdict(list(range(accepted)), [5] * accepted + [6])
    probing.pay(StepPlan([row], 16), Verdict([said]), seconds, 10 * MS, 1)


def test_probes_are_paid_from_a_hundredth_of_the_time_and_charged_what_they_took() -> None:
    trying, acceptance = probing()
    request = a_request("r")
    assert tried(trying, acceptance, request, 1) == 0  # nothing was earned yet
    for _ in range(35):
        trying.earn(10 * MS)  # 3.5 ms, and three more tokens take 3
    assert tried(trying, acceptance, request, 2) == 3
    observed(trying, request, 0, seconds=13.5 * MS)
    assert not trying.is_due
    for _ in range(36):
        trying.earn(10 * MS)
    assert trying.is_due


def test_a_probe_that_paid_costs_nothing_and_a_step_told_of_twice_is_no_fault() -> None:
    trying, acceptance = probing()
    request = a_request("r")
    for _ in range(35):
        trying.earn(10 * MS)
    assert tried(trying, acceptance, request, 1) == 3
    for _ in range(2):  # a step that broke is taken in halves, and told of for each
        observed(trying, request, 3, seconds=13 * MS)
    assert trying.is_due and tried(trying, acceptance, request, 2) == 3
