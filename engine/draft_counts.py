"""What became of guesses, counted: since the start, over the last minute, by position and by proposer. Decides nothing."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..proposers.base import FORCED
from .plan import StepPlan, Verdict
from .stats import EngineStats, ProposerStats

RECENT_WINDOW_S = 60


@dataclass
class _Bucket:
    second: int
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class DraftCounts:
    """Of one engine."""

    def __init__(self, proposers: Sequence[str]) -> None:
        """proposers: names, in the set's order."""
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self.totals = [ProposerStats(name) for name in proposers]
        self._accepted_per_position: list[int] = []
        self._recent: deque[_Bucket] = deque()

    def add(self, plan: StepPlan, verdict: Verdict, now: float, step_s: float) -> None:
        """What the target said about each draft of a step. now: seconds of the engine's clock; step_s: how long it took."""
        token_seconds = step_s / max(plan.num_tokens, 1)
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
        per_position = self._accepted_per_position
        per_position.extend([0] * (max(depths) - len(per_position)))
        for depth, count in depths.items():
            for position in range(depth):
                per_position[position] += count
        for source, (drafts, drafted, accepted) in sums.items():
            if source != FORCED:
                t = self.totals[source]
                self.totals[source] = replace(
                    t,
                    num_drafts=t.num_drafts + drafts,
                    num_draft_tokens=t.num_draft_tokens + drafted,
                    num_accepted_tokens=t.num_accepted_tokens + accepted,
                    verify_seconds=t.verify_seconds + token_seconds * drafted,
                )

    def fill(self, stats: EngineStats, now: float) -> EngineStats:
        """The snapshot with all counts."""
        self._drop_old(int(now))
        return replace(
            stats,
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            accepted_per_position=tuple(self._accepted_per_position),
            recent_drafts=sum(b.drafts for b in self._recent),
            recent_draft_tokens=sum(b.draft_tokens for b in self._recent),
            recent_accepted_tokens=sum(b.accepted_tokens for b in self._recent),
            proposers=tuple(self.totals),
        )

    def check(self) -> None:
        """Raise AssertionError if the totals contradict each other."""
        assert self.num_accepted_tokens == sum(self._accepted_per_position), "accepted tokens differ from their positions"
        assert self.num_accepted_tokens <= self.num_draft_tokens, "more accepted than drafted"

    def _bucket(self, second: int) -> _Bucket:
        self._drop_old(second)
        if not self._recent or self._recent[-1].second != second:
            self._recent.append(_Bucket(second))
        return self._recent[-1]

    def _drop_old(self, second: int) -> None:
        while self._recent and self._recent[0].second <= second - RECENT_WINDOW_S:
            self._recent.popleft()
