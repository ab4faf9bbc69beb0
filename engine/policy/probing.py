"""Guesses that are expected not to pay, for what they teach: who has them, and what they may cost.

Owns the allowance, a hundredth of the time; one row of a step has a probe at most. Knows how a row's answer is changed, not why it was
given.
"""

from collections.abc import Sequence

from ...kernels.record import record
from ..plan import StepPlan, Verdict
from .acceptance import ProposerAcceptance
from .assignment import Assignment
from .base import Wish
from .costs import CostTable
from .draft_choice import Candidate
from .load import Load

SHARE = 0.01  # of the time
MAX_SAVED_STEPS = 4.0  # of unspent allowance, in steps
MAX_LOST_STEPS = 16.0  # that one probe is charged for: more is a stolen core
DEPTH = 3  # of a closed row: enough to learn how chances go on
DEEPER = 2  # of an open row
CHEAPEST_S = 50e-6  # what a probe costs besides its draft


@record
class Probe:
    """Of the running step."""

    request_id: str
    proposer: int
    seconds: float  # expected to be lost if nothing of it is kept
    usual: int  # guesses of the same proposer that it would have had anyway
    is_alone: bool  # nobody else guesses: then all drafting of the step is the probe's


class Probing:
    """Of one engine."""

    def __init__(self, assignment: Assignment, acceptance: Sequence[ProposerAcceptance], costs: CostTable) -> None:
        self.probe: Probe | None = None
        self._assignment = assignment
        self._acceptance = acceptance
        self._costs = costs
        self._allowance = 0.0  # seconds that probes may lose
        self._price = 0.0  # of the latest probe that was thought of
        self._price_of_found = 0.0  # of the latest one of guesses that were there for the taking
        self._probed: dict[str, int] = {}  # request -> step of its latest probe
        self._tried: dict[int, int] = {}  # proposer -> step of the latest probe of it

    @property
    def is_due(self) -> bool:
        """Whether there is enough to spend for a probe like the latest one."""
        return self._allowance > self._price

    @property
    def is_due_for_found(self) -> bool:
        return self._allowance > self._price_of_found

    def earn(self, seconds: float) -> None:
        """The step took so long."""
        self._allowance += SHARE * seconds

    def pay(self, plan: StepPlan, verdict: Verdict, step_s: float, plain_s: float, num_rows: int) -> None:
        """What the step earned, less what its probe cost. step_s: with drafting. plain_s: a step without guesses, of num_rows tokens."""
        self._allowance = min(self._allowance + SHARE * step_s, MAX_SAVED_STEPS * plain_s)
        probe = self.probe
        if probe is None:
            return
        said = (v for r, v in zip(plan.rows, verdict.rows, strict=True) if r.request.request_id == probe.request_id)
        kept = sum(len(verdict.accepted) for verdict in said)
        lost, token_s = probe.seconds, step_s / sum(len(row.token_ids) for row in verdict.rows)
        if probe.is_alone:  # what it did take: a drafter that has to catch up takes more, one that finds nothing much less
            lost, token_s = min(max(0.0, step_s - plain_s), MAX_LOST_STEPS * plain_s), plain_s / num_rows
        lost -= max(0, kept - probe.usual) * token_s
        if lost > 0:
            self._allowance -= lost
        else:
            self._tried.pop(probe.proposer, None)  # it paid: once more, while it does

    def try_one(
        self, wishes: Sequence[Wish], candidates: list[Candidate], depths: list[int], load: Load, budget: int, step: int
    ) -> None:
        """Let the row that has waited longest guess more than pays, or with another proposer, if the allowance bears it.

        wishes: of the candidates, in their order. budget: guesses that may come on top of depths, which are changed in place.
        """
        budget -= sum(depths)
        if self._allowance <= 0 or budget <= 0:
            return
        waited = [self._probed.get(wish.request.request_id, -1) for wish in wishes]
        j = min(range(len(wishes)), key=waited.__getitem__)
        request, candidate = wishes[j].request, candidates[j]
        row = self._assignment.row(request)
        # Who costs little is tried the more often, so that all proposers cost about the same.
        drafts = self._costs.drafts
        stale = max(row.proposers, key=lambda p: (step - self._tried.get(p, -1)) / (drafts[p].seconds(DEPTH, 1) + CHEAPEST_S))
        proposer = stale if step % 2 or not depths[j] else candidate.proposer
        room = min(self._acceptance[proposer].shape.most(wishes[j]), row.ceilings[row.proposers.index(proposer)])
        deeper = room if self._acceptance[proposer].is_whole else depths[j] + DEEPER if depths[j] else DEPTH
        depth = min(room, max(deeper, 1), depths[j] + budget)
        if depth <= depths[j] and proposer == candidate.proposer:
            self._probed[request.request_id] = step  # it guesses all it can already
            return
        target = self._costs.target.at(load.context)
        num_tokens = load.num_rows + load.num_prompt + sum(depths)
        before = drafts[candidate.proposer].seconds(depths[j], 1) if proposer == candidate.proposer else 0.0
        seconds = target(num_tokens - depths[j] + depth) - target(num_tokens) + drafts[proposer].seconds(depth, 1) - before
        if proposer != candidate.proposer:  # and what the better one would have brought
            seconds += sum(candidate.worth.accepted[: depths[j]]) * target(load.num_rows) / load.num_rows
        self._price = seconds
        if seconds > self._allowance:
            return
        self._probed[request.request_id] = self._tried[proposer] = step
        self.probe = Probe(request.request_id, proposer, seconds, depths[j] if proposer == candidate.proposer else 0, not any(depths))
        candidates[j] = Candidate(proposer, depth, candidate.worth)
        depths[j] = depth

    def try_found(
        self, wishes: Sequence[Wish], candidates: Sequence[Candidate], depths: list[int], load: Load, budget: int, step: int
    ) -> None:
        """The same for guesses that are there for the taking and do not pay: of the row that has waited longest."""
        waited = [self._probed.get(wish.request.request_id, -1) for wish in wishes]
        j = min(range(len(wishes)), key=waited.__getitem__)
        candidate, target = candidates[j], self._costs.target.at(load.context)
        depth = min(candidate.ceiling, DEPTH, budget)
        tokens = load.num_rows + load.num_prompt
        seconds = target(tokens + depth) - target(tokens) + self._costs.drafts[candidate.proposer].seconds(depth, 1)
        self._price_of_found = seconds
        if depth <= 0 or seconds > self._allowance:
            return
        request_id = wishes[j].request.request_id
        self._probed[request_id] = self._tried[candidate.proposer] = step
        self.probe = Probe(request_id, candidate.proposer, seconds, 0, True)
        depths[j] = depth

    def forget(self, request_id: str) -> None:
        self._probed.pop(request_id, None)
