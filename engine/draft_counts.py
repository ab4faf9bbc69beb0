"""What became of guesses, counted: since the start, over the last minute, by position and by proposer. Decides nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..proposers.base import FORCED
from .plan import RoundsVerdict, StepPlan, Verdict
from .stats import EngineStats, ProposerStats

RECENT_WINDOW_S = 60


@dataclass(slots=True)
class DraftSums:
    """Drafts (row and step), and their tokens."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def add(self, drafts: int, draft_tokens: int, accepted_tokens: int) -> None:
        self.drafts += drafts
        self.draft_tokens += draft_tokens
        self.accepted_tokens += accepted_tokens


@dataclass(slots=True)
class _OfProposer(DraftSums):
    verify_seconds: float = 0.0


class DraftCounts:
    """Of one engine."""

    def __init__(self, proposers: Sequence[str]) -> None:
        """proposers: names, in the set's order."""
        self._names = tuple(proposers)
        self.sums = DraftSums()
        self._of_proposers = [_OfProposer() for _ in proposers]
        self._accepted_per_position: list[int] = []
        self._recent: deque[tuple[int, DraftSums]] = deque()  # second, and what was counted in it

    def add(self, plan: StepPlan, verdict: Verdict, now: float, step_s: float) -> None:
        """What the target said about each draft of a step. now: seconds of the engine's clock; step_s: how long it took."""
        drafts = [
            (row.source[0], len(row.draft_token_ids), len(said.accepted))
            for row, said in zip(plan.rows, verdict.rows, strict=True)
            if row.draft_token_ids and said.error is None
        ]
        if drafts:
            self._add(drafts, now, step_s / max(plan.num_tokens, 1))

    def add_rounds(self, verdict: RoundsVerdict, now: float) -> None:
        """The same of a step in rounds."""
        drafts = [(draft.proposer, draft.drafted, draft.accepted) for row in verdict.rows for draft in row.drafts]
        if drafts:
            self._add(drafts, now, sum(verdict.seconds) / max(sum(verdict.tokens), 1))

    def _add(self, drafts: Sequence[tuple[int, int, int]], now: float, token_s: float) -> None:
        """drafts: proposer, guesses and how many of them stood. token_s: seconds of the target for one token."""
        per_position = self._accepted_per_position
        drafted = accepted = 0
        for proposer, num_drafted, num_accepted in drafts:
            drafted += num_drafted
            accepted += num_accepted
            if num_accepted > len(per_position):
                per_position.extend([0] * (num_accepted - len(per_position)))
            for position in range(num_accepted):
                per_position[position] += 1
            if proposer != FORCED:
                total = self._of_proposers[proposer]
                total.add(1, num_drafted, num_accepted)
                total.verify_seconds += token_s * num_drafted
        self.sums.add(len(drafts), drafted, accepted)
        self._bucket(int(now)).add(len(drafts), drafted, accepted)

    @property
    def totals(self) -> tuple[ProposerStats, ...]:
        """Of each proposer, in the set's order."""
        return tuple(
            ProposerStats(name, p.drafts, p.draft_tokens, p.accepted_tokens, p.verify_seconds)
            for name, p in zip(self._names, self._of_proposers, strict=True)
        )

    def fill(self, stats: EngineStats, now: float) -> EngineStats:
        """The snapshot with all counts."""
        self._drop_old(int(now))
        recent = DraftSums()
        for _, sums in self._recent:
            recent.add(sums.drafts, sums.draft_tokens, sums.accepted_tokens)
        return replace(
            stats,
            num_drafts=self.sums.drafts,
            num_draft_tokens=self.sums.draft_tokens,
            num_accepted_tokens=self.sums.accepted_tokens,
            accepted_per_position=tuple(self._accepted_per_position),
            recent_drafts=recent.drafts,
            recent_draft_tokens=recent.draft_tokens,
            recent_accepted_tokens=recent.accepted_tokens,
            proposers=self.totals,
        )

    def check(self) -> None:
        """Raise AssertionError if the totals contradict each other."""
        assert self.sums.accepted_tokens == sum(self._accepted_per_position), "accepted tokens differ from their positions"
        assert self.sums.accepted_tokens <= self.sums.draft_tokens, "more accepted than drafted"

    def _bucket(self, second: int) -> DraftSums:
        self._drop_old(second)
        if not self._recent or self._recent[-1][0] != second:
            self._recent.append((second, DraftSums()))
        return self._recent[-1][1]

    def _drop_old(self, second: int) -> None:
        while self._recent and self._recent[0][0] <= second - RECENT_WINDOW_S:
            self._recent.popleft()
