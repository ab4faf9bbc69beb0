"""How much to speculate: each row's proposer and ceiling, by the policy that is on, and the statistics of what became of it.

Adaptive where costs are known and the configuration does not want fixed k. Never reads a clock: durations come with `observe`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..proposers.base import Draft
from ..proposers.config import SpeculativeConfig
from .adaptive_policy import AdaptivePolicy
from .costs import CostTable
from .fixed_policy import FixedPolicy
from .plan import RowGrant, StepPlan, Verdict
from .request import Request
from .speculation_policy import PREDICTION as PREDICTION
from .speculation_policy import SLOWER, Policy, RequestLimits, StepLimits, StepTimes, Wish
from .speculation_policy import ProposerInfo as ProposerInfo
from .stats import EngineStats, ProposerStats

RECENT_WINDOW_S = 60
NOT_MEASURED = StepTimes()
RESTING = StepLimits(0, SLOWER)


@dataclass
class _Bucket:
    second: int
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class Controller:
    """Owner of the policy and of what is counted about its guesses."""

    def __init__(self, config: SpeculativeConfig, proposers: tuple[ProposerInfo, ...], costs: CostTable | None = None) -> None:
        """costs: what steps take; without them nothing can be weighed, and k is fixed whatever the configuration says."""
        self.config = config
        self.proposers = proposers
        self.rules = RequestLimits(config, proposers)
        self.policy: Policy = (
            AdaptivePolicy(self.rules, costs, config.rejection_sample_method == "match")
            if config.adaptive and costs is not None
            else FixedPolicy(self.rules)
        )
        self.totals = [ProposerStats(p.name) for p in proposers]
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self.accepted_per_position: list[int] = []
        self.steps_off: Counter[str] = Counter()
        self.latest = StepLimits(0)
        self._recent: deque[_Bucket] = deque()

    def limits(self, num_rows: int) -> StepLimits:
        """What num_rows running rows (prefilling ones count) may do at most."""
        if self.policy.rests(num_rows):
            return RESTING
        return self.rules.limits(num_rows, self.policy.threshold(num_rows))

    def assign(self, request: Request) -> tuple[int, int]:
        """(proposer to ask first, most draft tokens): (-1, 0) for a request that wants no speculation."""
        return self.policy.assign(request)

    def share(self, wishes: Sequence[Wish], limits: StepLimits, budget: int) -> list[tuple[int, int]]:
        """(proposer, ceiling) of each row of the step, budget at most over all; remembers the step's limits for the statistics."""
        if limits.off is not None:
            budget = 0
        answer = self.policy.share(wishes, budget)
        off = limits.off
        if off is None and budget and any(w.room > 0 for w in wishes) and self.policy.state().off and not any(k for _, k in answer):
            off = SLOWER
        self.latest = limits if off == limits.off else replace(limits, off=off)
        if off:
            self.steps_off[off] += 1
        return answer

    def cut(self, grants: Sequence[RowGrant], draft: Draft) -> Sequence[int] | None:
        """Guesses of each made draft to verify; None = all of them."""
        return self.policy.cut(grants, draft)

    def forget(self, request_id: str) -> None:
        self.policy.forget(request_id)

    def observe(self, plan: StepPlan, verdict: Verdict, now: float, times: StepTimes = NOT_MEASURED) -> None:
        """Count what the target said about each draft. now: seconds of the engine's clock."""
        self.policy.observe(plan, verdict, times)
        token_seconds = times.step / max(plan.num_tokens, 1)
        depths: Counter[int] = Counter()  # accepted tokens of a draft -> drafts
        sums: dict[int, list[int]] = {}  # source -> drafts, drafted, accepted
        for row, said in zip(plan.rows, verdict.rows, strict=True):
            if row.draft_token_ids and said.error is None:
                depths[len(said.accepted)] += 1
                of_source = sums.setdefault(row.source[0], [0, 0, 0])
                of_source[0] += 1
                of_source[1] += len(row.draft_token_ids)
                of_source[2] += len(said.accepted)
        if not sums:
            return
        drafts, drafted, accepted = (sum(column) for column in zip(*sums.values(), strict=True))
        bucket = self._bucket(int(now))
        bucket.drafts += drafts
        bucket.draft_tokens += drafted
        bucket.accepted_tokens += accepted
        self.num_drafts += drafts
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        per_position = self.accepted_per_position
        per_position.extend([0] * (max(depths) - len(per_position)))
        for depth, count in depths.items():
            for position in range(depth):
                per_position[position] += count
        for source, (drafts, drafted, accepted) in sums.items():
            if source >= 0:
                t = self.totals[source]
                self.totals[source] = replace(
                    t,
                    num_drafts=t.num_drafts + drafts,
                    num_draft_tokens=t.num_draft_tokens + drafted,
                    num_accepted_tokens=t.num_accepted_tokens + accepted,
                    verify_seconds=t.verify_seconds + token_seconds * drafted,
                )

    def fill(self, stats: EngineStats, now: float) -> EngineStats:
        """The snapshot with everything that the controller counts."""
        while self._recent and self._recent[0].second <= int(now) - RECENT_WINDOW_S:
            self._recent.popleft()
        default, state = self.rules.default, self.policy.state()
        return replace(
            stats,
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            accepted_per_position=tuple(self.accepted_per_position),
            recent_drafts=sum(b.drafts for b in self._recent),
            recent_draft_tokens=sum(b.draft_tokens for b in self._recent),
            recent_accepted_tokens=sum(b.accepted_tokens for b in self._recent),
            num_speculative_tokens=min(self.latest.max_tokens, self.proposers[default].max_tokens if default >= 0 else 0),
            mean_draft_ceiling=state.k,
            estimated_speedup=state.speedup,
            speculation_off=self.latest.off,
            acceptance=self.config.lossy or self.config.rejection_sample_method,
            is_lossy=self.config.lossy is not None,
            steps_with_speculation_off=dict(self.steps_off),
            proposers=tuple(self.totals),
        )

    def check(self) -> None:
        """Raise if the totals contradict each other."""
        assert self.num_accepted_tokens == sum(self.accepted_per_position), "accepted tokens differ from their positions"
        assert self.num_accepted_tokens <= self.num_draft_tokens, "more accepted than drafted"

    def _bucket(self, second: int) -> _Bucket:
        if not self._recent or self._recent[-1].second != second:
            self._recent.append(_Bucket(second))
            while self._recent[0].second <= second - RECENT_WINDOW_S:
                self._recent.popleft()
        return self._recent[-1]
