"""Rounds in which a draft model guesses: how many a step has, and what they cost.

Within a call a pass waits for nothing but the draft, and what happens between two calls is shared among their rounds. So guesses may pay
there that would not in steps of one pass. Owns these costs.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ...kernels.rounds import ALTERNATES_PER_GUESS
from ..plan import RoundsAsked, RoundsPlan, RoundsVerdict, RowLookups
from ..request import Request
from .costs import CostTable, DraftCost
from .rounds_choice import rounds_within

DRAFTED_STEP_S = 30e-3  # seconds that such a step may take: its tokens come several at a time anyway, and so much later nobody sees them
WEIGHED_ROUNDS = 8  # for which a decision stands: a text that is hard to guess for is to be noticed
GAIN = 0.1  # share of a surprise that is believed
LEAST_SHARE = 0.25  # of what a proposer takes for a draft, that is its network's at least


def drafted_rounds(
    running: Sequence[Request], ceilings: Sequence[int], round_s: float, longest_unseen_s: float, most_at_once: int = 1
) -> RoundsAsked | None:
    """Rounds with so many guesses for each row; one only where it has alternates. round_s: seconds of one, the draft's included; 0 =
    unknown. most_at_once: as of `RoundsExecutor`."""
    step_s = max(DRAFTED_STEP_S, longest_unseen_s)
    if not round_s or not (most_rounds := rounds_within(step_s, round_s, running) or int(most_at_once > 1)):
        return None
    return RoundsAsked(most_rounds, step_s, [RowLookups(draft_k=ceiling) for ceiling in ceilings])


class DraftedRounds:
    """Of one engine with adaptive k."""

    def __init__(self, costs: CostTable, drafter: int, longest_unseen_s: float, most_at_once: int = 1) -> None:
        """drafter: who can guess there, -1 = nobody. longest_unseen_s: as in SchedulerConfig. most_at_once: as of `RoundsExecutor`."""
        self.drafter = drafter
        self._most_at_once = most_at_once
        self._longest_unseen_s = longest_unseen_s
        self._step_s = max(DRAFTED_STEP_S, longest_unseen_s)
        self._passes = costs.passes
        # Until it is known: what a step with a guess takes besides its pass, its proposer takes about as much besides its network.
        beside_s = max(0.0, costs.target.seconds(2) - costs.passes.seconds(2))
        grid = costs.drafts[drafter].figures() if drafter >= 0 else {}
        self._drafts = DraftCost({key: max(LEAST_SHARE * seconds, seconds - beside_s) for key, seconds in grid.items()})
        usual = rounds_within(self._step_s, costs.passes.seconds(2) + self._drafts.seconds(1, 1), ()) or 1
        self._beside_s = beside_s / min(usual, WEIGHED_ROUNDS)  # of each round

    def costs(self, running: Sequence[Request]) -> tuple[Callable[[float], float], DraftCost] | None:
        """Seconds of a round by its rows and guesses, and its draft's. None: these rows can have no rounds, or they are too long."""
        if self.drafter < 0 or any([request.prediction for request in running]):
            return None
        num_rows, beside_s, passes = len(running), self._beside_s, self._passes.at(_context(running))
        shortest = passes(num_rows + 1) + beside_s + self._drafts.seconds(1, 1)
        if self._most_at_once == 1 and not rounds_within(self._step_s, shortest, running):
            return None
        return lambda tokens: passes(self._filled(num_rows, tokens)) + beside_s, self._drafts

    def ask(self, running: Sequence[Request], ceilings: Sequence[int]) -> RoundsAsked | None:
        """None if they are too long."""
        seconds = self._passes.seconds(self._filled(len(running), len(running) + sum(ceilings)), _context(running)) + self._beside_s
        seconds += self._drafts.seconds(max(ceilings), sum([ceiling > 0 for ceiling in ceilings]))
        asked = drafted_rounds(running, ceilings, seconds, self._longest_unseen_s, self._most_at_once)
        return None if asked is None else replace(asked, most_rounds=min(asked.most_rounds, WEIGHED_ROUNDS))

    def _filled(self, num_rows: int, tokens: float) -> float:
        """Tokens of a pass that has so many with guesses, its alternates with them."""
        return tokens + max(0, min(ALTERNATES_PER_GUESS * (tokens - num_rows), self._most_at_once - tokens))

    def observe(self, plan: RoundsPlan, verdict: RoundsVerdict, seconds: float) -> None:
        """A step of such rounds took so long, everything included."""
        num_rounds = len(verdict.tokens)
        i = min(1, num_rounds - 1)  # the first finds the caches full of other things
        self._passes.observe(verdict.tokens[i], sum([row.num_computed for row in plan.rows]), verdict.seconds[i])
        self._drafts.observe(max([row.lookups.draft_k for row in plan.rows]), plan.num_drafted, verdict.draft_seconds[i])
        beside_s = (seconds - sum(verdict.seconds) - sum(verdict.draft_seconds)) / num_rounds
        self._beside_s += GAIN * (beside_s - self._beside_s)


def _context(running: Sequence[Request]) -> int:
    return sum([request.num_computed_tokens for request in running])
