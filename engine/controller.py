"""How much to speculate: the fixed policy. Decides each row's proposer and ceiling, and keeps the acceptance statistics.

Fixed k as in vLLM: every row may guess as much as its proposers make, unless more than `disable_by_batch_size` rows run.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, replace

from ..proposers.config import SpeculativeConfig
from .plan import StepPlan, Verdict
from .request import Request
from .stats import EngineStats, ProposerStats

PREDICTION = "prediction"
RECENT_WINDOW_S = 60


@dataclass(frozen=True)
class StepLimits:
    """What holds for every row of one step."""

    max_tokens: int  # most draft tokens of one row
    off: str | None = None  # why nobody may guess; None = they may


@dataclass(frozen=True)
class ProposerInfo:
    """What the policy knows of one proposer of the set, in the set's order."""

    name: str
    max_tokens: int


@dataclass
class _Bucket:
    second: int
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class Controller:
    """Owner of acceptance statistics and draft ceilings. Never reads a clock: time comes with `observe`."""

    def __init__(self, config: SpeculativeConfig, proposers: tuple[ProposerInfo, ...]) -> None:
        self.config = config
        self.proposers = proposers
        self.totals = [ProposerStats(p.name) for p in proposers]
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self.accepted_per_position: list[int] = []
        self.steps_off: Counter[str] = Counter()
        self.latest = StepLimits(0)
        self._recent: deque[_Bucket] = deque()
        self._index = {p.name: i for i, p in enumerate(proposers)}
        self._default = next((i for i, p in enumerate(proposers) if p.name != PREDICTION), -1)

    def limits(self, num_rows: int) -> StepLimits:
        """What num_rows running rows (prefilling ones count) may do. Exactly the threshold still speculates."""
        if self.config.off or not self.proposers:
            return StepLimits(0, "no proposer configured")
        if num_rows > self.config.disable_by_batch_size:
            return StepLimits(0, "batch size")
        for first, last, k in self.config.num_speculative_tokens_per_batch_size:
            if first <= num_rows <= last:
                return StepLimits(k, None if k else "batch size")
        return StepLimits(max(p.max_tokens for p in self.proposers))

    def assign(self, request: Request) -> tuple[int, int]:
        """(proposer to ask first, most draft tokens): (-1, 0) for a request that wants no speculation."""
        wanted = request.params.speculation_settings
        match wanted.method:
            case "off":
                return -1, 0
            case "auto" if request.prediction and PREDICTION in self._index:
                first = self._index[PREDICTION]
            case "auto":
                first = self._default
            case name:
                first = self._index.get(name, -1)
        if first < 0:
            return -1, 0
        # An empty draft falls through to the proposers behind, so the widest of them sets the ceiling.
        ceiling = max(p.max_tokens for p in self.proposers[first:])
        if wanted.num_speculative_tokens is not None:
            ceiling = min(ceiling, wanted.num_speculative_tokens)
        return (first, ceiling) if ceiling else (-1, 0)

    def decide(self, limits: StepLimits) -> None:
        """The step's final limits, for the statistics."""
        self.latest = limits
        if limits.off:
            self.steps_off[limits.off] += 1

    def observe(self, plan: StepPlan, verdict: Verdict, now: float) -> None:
        """Count what the target said about each draft. now: seconds of the engine's clock."""
        bucket: _Bucket | None = None
        for row, said in zip(plan.rows, verdict.rows, strict=True):
            if not row.draft_token_ids or said.error is not None:
                continue
            if bucket is None:
                bucket = self._bucket(int(now))
            drafted, accepted = len(row.draft_token_ids), len(said.accepted)
            bucket.drafts += 1
            bucket.draft_tokens += drafted
            bucket.accepted_tokens += accepted
            self.num_drafts += 1
            self.num_draft_tokens += drafted
            self.num_accepted_tokens += accepted
            while len(self.accepted_per_position) < accepted:
                self.accepted_per_position.append(0)
            for depth in range(accepted):
                self.accepted_per_position[depth] += 1
            source = row.source[0]
            if source >= 0:
                t = self.totals[source]
                self.totals[source] = replace(
                    t,
                    num_drafts=t.num_drafts + 1,
                    num_draft_tokens=t.num_draft_tokens + drafted,
                    num_accepted_tokens=t.num_accepted_tokens + accepted,
                )

    def fill(self, stats: EngineStats, now: float) -> EngineStats:
        """The snapshot with everything that the controller counts."""
        while self._recent and self._recent[0].second <= int(now) - RECENT_WINDOW_S:
            self._recent.popleft()
        return replace(
            stats,
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            accepted_per_position=tuple(self.accepted_per_position),
            recent_drafts=sum(b.drafts for b in self._recent),
            recent_draft_tokens=sum(b.draft_tokens for b in self._recent),
            recent_accepted_tokens=sum(b.accepted_tokens for b in self._recent),
            num_speculative_tokens=min(self.latest.max_tokens, self.proposers[self._default].max_tokens if self._default >= 0 else 0),
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
