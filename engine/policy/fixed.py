"""Fixed k, as vLLM has it: every row may guess as much as its proposers make, below a number of running rows."""

from collections.abc import Sequence

from ...proposers.base import Draft
from ..plan import RoundsAsked, RoundsPlan, RoundsVerdict, RowGrant, RowLookups, StepPlan, Verdict
from ..request import Request
from .base import PolicyState, RequestLimits, StepTimes, Wish
from .drafted_rounds import drafted_rounds
from .rounds_choice import rounds_within

DEFAULT_THRESHOLD = 16
"""Running requests above which vLLM's guidance switches speculation off, if nothing is configured."""

SHORTEST_PASS_S = 2e-3
"""Of plain passes that are taken several at a time: they fill the caches with weights, and to leave the call then takes 0.3 to 0.5 ms."""


class FixedPolicy:
    """Even shares of the draft budget, whatever becomes of the guesses."""

    off: str | None = None  # nobody is ever refused for what guessing brings
    has_left = False

    def __init__(self, rules: RequestLimits) -> None:
        self._rules = rules
        self._pass_s = 0.0  # of the latest step, everything included
        self._k = 0.0

    def assign(self, request: Request) -> tuple[int, int]:
        return self._rules.assign(request)

    @property
    def threshold(self) -> int | None:
        given = self._rules.config.disable_by_batch_size
        return DEFAULT_THRESHOLD if given is None else given

    def look(self, running: Sequence[Request], has_begun: bool, may_round: bool) -> None: ...

    def rounds(self, running: Sequence[Request], most: int, ceilings: Sequence[int]) -> RoundsAsked | None:
        """Several passes where a drafter guesses between them; several plain ones where nobody may guess."""
        step_s = self._rules.longest_unseen_s
        if any(ceilings):
            return drafted_rounds(running, ceilings, self._pass_s, step_s, self._rules.most_at_once)
        if any([self.assign(request)[1] for request in running]) and most:
            return None
        if not step_s or self._pass_s <= SHORTEST_PASS_S or not (num_rounds := rounds_within(step_s, self._pass_s, running)):
            return None
        return RoundsAsked(num_rounds, step_s, [RowLookups()] * len(running))

    def observe_rounds(self, plan: RoundsPlan, verdict: RoundsVerdict, seconds: float) -> None:
        self._pass_s = seconds / len(verdict.tokens)

    def rests(self, num_rows: int) -> bool:
        return False

    def likely(self, request: Request, room: int) -> int:
        return min(self.assign(request)[1], room)

    def share(self, wishes: Sequence[Wish], budget: int) -> list[tuple[int, int]]:
        assigned = [self.assign(wish.request) for wish in wishes]
        shapes = self._rules.shapes
        ceilings = [ceiling and min(ceiling, shapes[p].most(wish)) for (p, ceiling), wish in zip(assigned, wishes, strict=True)]
        num_guessing = sum(ceiling > 0 for ceiling in ceilings)
        for i, ceiling in enumerate(ceilings):
            if ceiling > 0:
                ceilings[i] = min(ceiling, -(-budget // num_guessing))
                num_guessing -= 1
                budget -= ceilings[i]
        num_rows = sum(wish.samples for wish in wishes)
        self._k = sum(ceilings) / num_rows if num_rows else 0.0
        return [(proposer, ceiling) for (proposer, _), ceiling in zip(assigned, ceilings, strict=True)]

    def cut(self, grants: Sequence[RowGrant], draft: Draft) -> Sequence[int] | None:
        return None

    def observe(self, plan: StepPlan, verdict: Verdict, times: StepTimes) -> None:
        for row in plan.rows:
            if not row.is_chain:
                self._rules.shapes[row.source[-1]].see(is_chain=False)
        if all([row.num_scheduled == 1 for row in plan.rows]):
            self._pass_s = times.step + sum(times.draft)

    def forget(self, request_id: str) -> None: ...

    def state(self) -> PolicyState:
        return PolicyState(self._k)
