"""How much to speculate: each row's proposer and ceiling, by the policy that is on.

Adaptive where costs are known and the configuration does not want fixed k. Never reads a clock: durations come with `observe`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ..proposers.base import Draft
from ..proposers.config import SpeculativeConfig
from .draft_counts import DraftCounts
from .plan import RoundsAsked, RoundsPlan, RoundsVerdict, RowGrant, StepPlan, Verdict
from .policy.adaptive import AdaptivePolicy
from .policy.base import BATCH_SIZE, PREDICTION, SLOWER, Policy, ProposerInfo, RequestLimits, StepLimits, StepTimes, Wish
from .policy.costs import CostTable
from .policy.fixed import FixedPolicy
from .request import Request
from .stats import EngineStats

NOT_MEASURED = StepTimes()
RESTING = StepLimits(0, SLOWER)
LOOKING = StepLimits(0)  # a rest in which scouts look for guesses: that they find none is no reason why speculation is off


class Controller:
    """Owner of the policy and of the counts. Asked by scheduler and core."""

    def __init__(
        self,
        config: SpeculativeConfig,
        proposers: tuple[ProposerInfo, ...],
        costs: CostTable | None = None,
        longest_unseen_s: float = 0.0,
    ) -> None:
        """costs: what steps take; without them nothing can be weighed, and k is fixed whatever the configuration says.

        longest_unseen_s: as in SchedulerConfig.
        """
        self.config = config
        self.proposers = proposers
        self.rules = RequestLimits(config, proposers, longest_unseen_s)
        self.policy: Policy = (
            AdaptivePolicy(self.rules, costs) if config.adaptive and costs is not None else FixedPolicy(self.rules)
        )
        self.most_tokens = max((p.max_tokens for p in proposers if p.name != PREDICTION), default=0)  # guessed for a row in a step
        self.counts = DraftCounts([p.name for p in proposers])
        self.steps_off: Counter[str] = Counter()
        self.latest = StepLimits(0)
        self._num_rows = 0  # in the latest step

    def look(self, running: Sequence[Request], has_begun: bool = False, may_round: bool = False) -> None:
        """A step begins with these rows, newcomers aside. has_begun: as in Scheduler.schedule. may_round: as far as the rows go, it can be
        one in rounds."""
        if may_round:
            may_round = self._allowed(len(running)).off != BATCH_SIZE
        self.policy.look(running, has_begun, may_round)

    def limits(self, num_rows: int) -> StepLimits:
        """What num_rows running rows (prefilling ones count) may do at most."""
        self._num_rows = num_rows
        return RESTING if self.policy.rests(num_rows) else self._allowed(num_rows)

    def assign(self, request: Request) -> tuple[int, int]:
        """(proposer to ask first, most draft tokens): (-1, 0) for a request that wants no speculation."""
        return self.policy.assign(request)

    def share(self, wishes: Sequence[Wish], limits: StepLimits, budget: int) -> list[tuple[int, int]]:
        """(proposer, ceiling) of each row of the step, budget at most over all; remembers the step's limits for the statistics."""
        if limits.off is not None:
            budget = 0
        answer = self.policy.share(wishes, budget)
        self.latest = limits
        if limits is RESTING:
            self.latest = limits if self.policy.off else LOOKING
        elif budget and self.policy.off and any(w.room > 0 for w in wishes) and not any(k for _, k in answer):
            self.latest = StepLimits(limits.max_tokens, SLOWER)
        if self.latest.off:
            self.steps_off[self.latest.off] += 1
        return answer

    def rounds(self, running: Sequence[Request], ceilings: Sequence[int]) -> RoundsAsked | None:
        """The step can be one in rounds: what it may do then; None = it is one pass. ceilings: as in Policy."""
        limits = self._allowed(len(running))
        if (asked := self.policy.rounds(running, limits.max_tokens, ceilings)) is not None:
            self.latest, self._num_rows = limits, len(running)
        return asked

    def _allowed(self, num_rows: int) -> StepLimits:
        """What configuration and batch size allow, whoever rests."""
        return self.rules.limits(num_rows, self.policy.threshold)

    def observe_rounds(self, plan: RoundsPlan, verdict: RoundsVerdict, now: float, seconds: float) -> None:
        """The same as `observe` for a step in rounds."""
        self.policy.observe_rounds(plan, verdict, seconds)
        if self.latest.off:
            self.steps_off[self.latest.off] += len(verdict.tokens) - 1  # one was counted with the shares
        self.counts.add_rounds(verdict, now)

    def cut(self, grants: Sequence[RowGrant], draft: Draft) -> Sequence[int] | None:
        """Guesses of each made draft to verify; None = all of them."""
        return self.policy.cut(grants, draft)

    def forget(self, request_id: str) -> None:
        self.policy.forget(request_id)

    def observe(self, plan: StepPlan, verdict: Verdict, now: float, times: StepTimes = NOT_MEASURED) -> None:
        """What the target said about each draft. now: seconds of the engine's clock."""
        self.policy.observe(plan, verdict, times)
        self.counts.add(plan, verdict, now, times.step)

    def fill(self, stats: EngineStats, now: float) -> EngineStats:
        """The snapshot with everything that is known here."""
        state = self.policy.state()
        return replace(
            self.counts.fill(stats, now),
            num_speculative_tokens=min(self._allowed(self._num_rows).max_tokens, self.most_tokens),
            mean_draft_ceiling=state.k,
            estimated_speedup=state.speedup,
            speculation_off=self.latest.off,
            acceptance=self.config.lossy or self.config.rejection_sample_method,
            is_lossy=self.config.lossy is not None,
            steps_with_speculation_off=dict(self.steps_off),
        )

    def check(self) -> None:
        """Raise AssertionError if the counts contradict each other."""
        self.counts.check()
