"""What became of guesses, counted: since the start, over the last minute, by position and by proposer. Decides nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ..proposers.base import FORCED
from .plan import RoundsVerdict, Settled, StepPlan, Verdict
from .stats import EngineStats, ProposerStats

RECENT_WINDOW_S = 60


Case = tuple[int, int, int, int]
"""A draft's proposer, tokens, those accepted, and those that a form left no choice about: the first ones, not the proposer's."""
Tally = dict[Case, int]
"""How many such drafts (row and step) there were."""


@dataclass(frozen=True, slots=True)
class DraftSums:
    """Drafts, and their tokens."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    @classmethod
    def of(cls, tally: Tally) -> DraftSums:
        cases = list(tally.items())  # at once: another thread may be counting
        return cls(
            sum([times for _, times in cases]),
            sum([times * drafted for (_, drafted, _, _), times in cases]),
            sum([times * accepted for (_, _, accepted, _), times in cases]),
        )


class DraftCounts:
    """Of one engine. Steps only count; sums are made for who asks."""

    def __init__(self, proposers: Sequence[str]) -> None:
        """proposers: names, in the set's order."""
        self._names = tuple(proposers)
        self._all: Tally = {}
        self._recent: deque[tuple[int, Tally]] = deque()  # second, and what was counted in it
        self._verify_seconds = [0.0] * len(proposers)

    def add(self, plan: StepPlan, verdict: Verdict, now: float, step_s: float) -> None:
        """What the target said about each draft of a step. now: seconds of the engine's clock; step_s: how long it took."""
        drafts = [
            row.settled(len(said.accepted))
            for row, said in zip(plan.rows, verdict.rows, strict=True)
            if row.draft_token_ids and said.error is None
        ]
        if drafts:
            self._add(drafts, now, step_s / max(plan.num_tokens, 1))

    def add_rounds(self, verdict: RoundsVerdict, now: float) -> None:
        """The same of a step in rounds."""
        drafts = [draft for row in verdict.rows for draft in row.drafts]
        if drafts:
            self._add(drafts, now, sum(verdict.seconds) / max(sum(verdict.tokens), 1))

    def _add(self, drafts: Sequence[Settled], now: float, token_s: float) -> None:
        """token_s: seconds of the target for one token."""
        recent, total = self._bucket(int(now)), self._all
        tally: Tally = {}
        for draft in drafts:  # in a batch many are alike
            case = draft.proposer, draft.drafted, draft.accepted, draft.forced
            tally[case] = tally.get(case, 0) + 1
        for case, times in tally.items():
            recent[case] = recent.get(case, 0) + times
            total[case] = total.get(case, 0) + times
            proposer, drafted, _, forced = case
            if proposer != FORCED:
                self._verify_seconds[proposer] += token_s * times * (drafted - forced)

    @property
    def sums(self) -> DraftSums:
        """Of all proposers."""
        return DraftSums.of(self._all)

    @property
    def totals(self) -> tuple[ProposerStats, ...]:
        """Of each proposer, in the set's order."""
        found: list[ProposerStats] = []
        cases = list(self._all.items())
        for p, (name, verify_seconds) in enumerate(zip(self._names, self._verify_seconds, strict=True)):
            sums = DraftSums.of(_own([(draft, times) for draft, times in cases if draft[0] == p]))
            found.append(ProposerStats(name, sums.drafts, sums.draft_tokens, sums.accepted_tokens, verify_seconds))
        return tuple(found)

    @property
    def accepted_per_position(self) -> tuple[int, ...]:
        """Of the first guesses of all drafts, the second ones, ..., how many were accepted."""
        cases = list(self._all.items())
        ended = [0] * max([draft[2] for draft, _ in cases], default=0)  # drafts whose last accepted guess was that one
        for (_, _, accepted, _), times in cases:
            if accepted:
                ended[accepted - 1] += times
        return tuple(accumulate(reversed(ended)))[::-1]

    def fill(self, stats: EngineStats, now: float) -> EngineStats:
        """The snapshot with all counts."""
        self._drop_old(int(now))
        sums, latest = self.sums, [DraftSums.of(tally) for _, tally in list(self._recent)]
        return replace(
            stats,
            num_drafts=sums.drafts,
            num_draft_tokens=sums.draft_tokens,
            num_accepted_tokens=sums.accepted_tokens,
            accepted_per_position=self.accepted_per_position,
            recent_draft_tokens=sum([of.draft_tokens for of in latest]),
            recent_accepted_tokens=sum([of.accepted_tokens for of in latest]),
            proposers=self.totals,
        )

    def check(self) -> None:
        """Raise AssertionError if a draft has more accepted than it had."""
        assert all(accepted <= drafted for _, drafted, accepted, _ in self._all), "more accepted than drafted"

    def _bucket(self, second: int) -> Tally:
        if not self._recent or self._recent[-1][0] != second:
            self._drop_old(second)
            self._recent.append((second, {}))
        return self._recent[-1][1]

    def _drop_old(self, second: int) -> None:
        while self._recent and self._recent[0][0] <= second - RECENT_WINDOW_S:
            self._recent.popleft()


def _own(cases: Sequence[tuple[Case, int]]) -> Tally:
    """The part of each draft that is the proposer's."""
    found: Tally = {}
    for (proposer, drafted, accepted, forced), times in cases:
        own = proposer, drafted - forced, max(0, accepted - forced), 0
        found[own] = found.get(own, 0) + times
    return found
