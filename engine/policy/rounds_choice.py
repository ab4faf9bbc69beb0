"""How many rounds a step has and how much each row may look up in one, and what rounds bring.

Looking something up is free there, so the only question is how many guesses are worth verifying, and whose. Owns the rate at which steps in
rounds bring tokens, which other proposers have to beat, and how far a table is trusted.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..plan import RoundsAsked, RoundsPlan, RoundsVerdict, RowLookups, Settled
from ..request import Request
from .acceptance import ProposerAcceptance
from .assignment import Assignment
from .base import RequestLimits
from .costs import TargetCost
from .table_trust import TableTrust

STEP_S = 6e-3  # seconds that a step in rounds may take: one that waits ends it after the round, but nobody sees tokens before
MOST_ROUNDS = 32
FEWEST_ROUNDS = 2
ROUNDS_TO_A_STOP = 4  # where a stop string may end a row, which is only seen behind the call
RETRY_EVERY = 256  # steps that are too long for rounds, one of which has some nevertheless, ...
RETRIED = 2.0  # ... if it is not more than so many times too long
TRY_EVERY = 16  # steps after which guesses that are not worth it are tried
TRIED = 2  # guesses of such a try
LEARNT_DRAFTS = 4  # of a step, at most, teach something
RECENT = 0.9  # fade of what rounds brought with each step


@dataclass(slots=True)
class _Brought:
    """By steps with so many rows. Both fade."""

    tokens: float = 0.0
    seconds: float = 0.0
    pass_seconds: float = 0.0  # of these


def rounds_within(step_s: float, pass_s: float, running: Sequence[Request]) -> int:
    """Passes of pass_s seconds that a step of step_s has room for; 0 if they are not several."""
    most = min(MOST_ROUNDS, int(step_s / pass_s))
    if any([request.params.stop for request in running]):
        most = min(most, ROUNDS_TO_A_STOP)
    return most if most >= FEWEST_ROUNDS else 0


class RoundsChoice:
    """Of looking up, in one engine."""

    def __init__(
        self, assignment: Assignment, acceptance: Sequence[ProposerAcceptance], passes: TargetCost, rules: RequestLimits
    ) -> None:
        """passes: what they cost where nothing else happens in between."""
        self._assignment = assignment
        self._acceptance = acceptance
        self._passes = passes
        self._prediction, self._text, self._table = rules.prediction, rules.text_lookup, rules.table_lookup
        self._trust = TableTrust()
        self._brought: dict[tuple[int, bool], _Brought] = {}  # by number of rows, and whether any has a prediction
        self._num_asked = 0
        self._num_refused = 0  # steps whose passes were too long
        self._is_retried = False  # this one is, too
        self.k = 0.0  # mean of the latest step's guesses
        self.most = 0  # rounds of this step; 0 = it is none in rounds
        self.expected_rate: float | None = 0.0  # tokens a second of the step, were it one in rounds; as in `rate`

    def look(self, running: Sequence[Request], may_round: bool) -> None:
        """A step begins. may_round: as in Policy."""
        self.most = self.most_rounds(running) if may_round else 0
        self.expected_rate = self.rate(running) if self.most else 0.0

    def most_rounds(self, running: Sequence[Request]) -> int:
        """0 if there is nothing to look in, or a pass takes so long that nothing is gained by not leaving the call. Where it is hardly
        longer that is tried now and then: what it takes is only learnt in rounds."""
        self._is_retried = False
        if max(self._text, self._table) < 0:
            return 0
        seconds = self._passes.seconds(len(running), sum(request.num_computed_tokens for request in running))
        if most := rounds_within(STEP_S, seconds, running):
            return most
        self._num_refused += 1
        self._is_retried = self._num_refused % RETRY_EVERY == 0 and seconds * FEWEST_ROUNDS < RETRIED * STEP_S
        return FEWEST_ROUNDS if self._is_retried else 0

    def rate(self, running: Sequence[Request]) -> float | None:
        """Tokens a second that rounds have brought to rows like these lately; None = they are to be tried first, 0 = they bring nothing."""
        if not any(self._looks_up(request) for request in running):
            return 0.0
        brought = self._brought.get(_kind(running))
        if brought is None:
            return 0.0 if self._is_retried else None
        return brought.tokens / brought.seconds if brought.seconds else 0.0

    def ask(self, running: Sequence[Request], most: int) -> RoundsAsked | None:
        """most: guesses of one row and round. None if no row wants anything looked up."""
        self._num_asked += 1
        context = sum(request.num_computed_tokens for request in running)
        pass_s, num_rows = self._passes.at(context), len(running)
        prices = self._prices(running, most, pass_s) if self._table >= 0 else ()
        wanted = [self._lookups_of(request, i, most, num_rows, pass_s, prices) for i, request in enumerate(running)]
        if all(lookups is None for lookups in wanted):
            return None
        asked = [lookups or RowLookups() for lookups in wanted]
        self.k = sum([lookups.k for lookups in asked]) / num_rows
        return RoundsAsked(self.most, STEP_S, asked, prices)

    def observe(self, plan: RoundsPlan, verdict: RoundsVerdict, seconds: float, step: int) -> None:
        """A step in rounds took so long, everything included."""
        num_later, turn = len(verdict.tokens) - 1, self._num_asked
        if num_later:  # the first pass finds the caches full of other things
            i = 1 + turn % num_later
            self._passes.observe(verdict.tokens[i], sum(row.num_computed for row in plan.rows), verdict.seconds[i])
        drafts: list[tuple[Request, Settled]] = []
        self._trust.step()
        for row, said in zip(plan.rows, verdict.rows, strict=True):
            for draft in said.drafts:
                if draft.proposer == self._table:
                    self._trust.observe(row.request.request_id, draft.expected, draft.accepted)
                else:
                    drafts.append((row.request, draft))
        period = -(-len(drafts) // LEARNT_DRAFTS) or 1
        for request, draft in drafts[turn % period :: period]:
            self._acceptance[draft.proposer].observe(
                request.request_id, draft.drafted, draft.drafted, draft.drafted, range(draft.accepted), True, step
            )
        brought = self._brought.setdefault(_kind([row.request for row in plan.rows]), _Brought())
        brought.tokens = RECENT * brought.tokens + sum(len(said.token_ids) for said in verdict.rows)
        brought.seconds = RECENT * brought.seconds + seconds
        brought.pass_seconds = RECENT * brought.pass_seconds + sum(verdict.seconds)

    def forget(self, request_id: str) -> None:
        self._trust.forget(request_id)

    def _looks_up(self, request: Request) -> bool:
        """Whether anything may be looked up for that row."""
        allowed = self._assignment.row(request).most
        return self._text in allowed or self._table in allowed or (self._prediction in allowed and bool(request.prediction))

    def _prices(self, running: Sequence[Request], most: int, pass_s: Callable[[float], float]) -> list[float]:
        """Of 0, 1, ... guesses of each row: the tokens of one row that passes bring in the time that theirs takes longer.

        If each has as many: by the mean over rows, not by the last one's, since a pass's cost has steps.
        """
        num_rows = len(running)
        brought = self._brought.get(_kind(running))
        plain_s = pass_s(num_rows)
        rate = brought.tokens / brought.pass_seconds if brought is not None and brought.pass_seconds else num_rows / plain_s
        depth = min(most, max(self._acceptance[p].depth for p in (self._table, self._text) if p >= 0))
        return [*accumulate((rate / num_rows * (pass_s(num_rows * (1 + k)) - plain_s) for k in range(depth + 1)), max)]

    def _lookups_of(
        self, request: Request, place: int, most: int, num_rows: int, pass_s: Callable[[float], float], prices: Sequence[float]
    ) -> RowLookups | None:
        """None if the request wants nothing looked up."""
        allowed = self._assignment.row(request).most
        predicted = min(allowed.get(self._prediction, 0), most) if request.prediction else 0
        looked_up, from_table = min(allowed.get(self._text, 0), most), min(allowed.get(self._table, 0), most)
        if not (predicted or looked_up or from_table):
            return None
        is_tried = (self._num_asked + place) % TRY_EVERY == 0
        predicted_k = self._depth(self._prediction, request, predicted, num_rows, pass_s, is_tried)
        text_k = self._depth(self._text, request, looked_up, num_rows, pass_s, is_tried)
        if not from_table:
            return RowLookups(predicted_k, text_k)
        if is_tried:  # the table at its word, and the text first, for what it has is rarer
            return RowLookups(predicted_k, text_k, from_table, math.inf)
        chances = self._acceptance[self._text].worth(request.request_id).chances[:text_k] if text_k else ()
        return RowLookups(predicted_k, text_k, from_table, sum(chances) - prices[text_k], self._trust.of(request.request_id))

    def _depth(
        self, proposer: int, request: Request, most: int, num_rows: int, pass_s: Callable[[float], float], is_tried: bool
    ) -> int:
        """Guesses of one row with which a pass brings the most tokens a second, if the others have none."""
        if not most:
            return 0
        gained, best, depth = 0.0, num_rows / pass_s(num_rows), 0
        for k, chance in enumerate(self._acceptance[proposer].worth(request.request_id).chances[:most], 1):
            gained += chance
            if (rate := (num_rows + gained) / pass_s(num_rows + k)) > best:
                best, depth = rate, k
        return depth or (min(TRIED, most) if is_tried else 0)


def _kind(requests: Sequence[Request]) -> tuple[int, bool]:
    """Rows that rounds bring about as much to."""
    return len(requests), any([request.prediction for request in requests])
