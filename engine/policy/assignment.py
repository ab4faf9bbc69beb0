"""Which proposer should guess for a row: among those that its request allows, the one with the most tokens a second.

Owns what a request allows, which never changes, and the latest answer. Estimates come from acceptance.py and costs.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..request import Request
from .acceptance import ProposerAcceptance, Worth
from .base import RequestLimits
from .costs import CostTable

Scouts = tuple[tuple[int, int], ...]
"""(proposer, ceiling) of scouts, in the set's order."""

STEPS = 4  # for which a row's best proposer is not asked for again


@dataclass(slots=True)
class RowOptions:
    """Who may guess for a row, how much, and who should. Scouts stand apart: what they have is known before they are asked."""

    proposers: Sequence[int]
    ceilings: Sequence[int]  # of each
    scouts: Scouts
    most: Mapping[int, int]  # ceilings of all of them, by proposer
    best: int = 0  # index into proposers
    until: int = 0  # step from which that is asked again

    @property
    def proposer(self) -> int:
        return self.proposers[self.best]

    @property
    def ceiling(self) -> int:
        return self.ceilings[self.best]


class Assignment:
    """Of all rows of one engine."""

    def __init__(self, rules: RequestLimits, acceptance: Sequence[ProposerAcceptance], costs: CostTable) -> None:
        self._rules = rules
        self._acceptance = acceptance
        self._costs = costs
        self._rows: dict[str, RowOptions] = {}
        self.scouts = {p: info.have_guesses for p, info in enumerate(rules.proposers) if info.have_guesses is not None}
        self._known: dict[tuple[int, ...], int] = {}  # answers of this step: most rows that nobody has guessed for yet are worth the same

    def row(self, request: Request) -> RowOptions:
        row = self._rows.get(request.request_id)
        if row is None:
            row = self._rows[request.request_id] = self._options(request)
        return row

    def _options(self, request: Request) -> RowOptions:
        told = request.params.speculation_settings.num_speculative_tokens
        proposers: list[int] = []
        ceilings: list[int] = []
        scouts: Scouts = ()
        for p in self._rules.options(request):
            info = self._rules.proposers[p]
            most = info.max_tokens if told is None else min(info.max_tokens, told)
            if info.have_guesses is not None:
                scouts += ((p, most),) if most else ()
            else:
                proposers.append(p)
                ceilings.append(most)
        return RowOptions(proposers, ceilings, scouts, dict([*zip(proposers, ceilings, strict=True), *scouts]))

    def begin_step(self) -> None:
        self._known.clear()

    def choose(self, row: RowOptions, request_id: str, step: int, num_rows: int, context: int) -> None:
        """Settle the row's best proposer, as if all num_rows rows were like it."""
        if len(row.proposers) < 2 or step < row.until:
            return
        worths = [self._acceptance[p].worth(request_id) for p in row.proposers]
        key = tuple(map(id, worths))
        if key not in self._known:
            rates = [self.rate(p, worth, num_rows, context) for p, worth in zip(row.proposers, worths, strict=True)]
            self._known[key] = rates.index(max(rates))
        row.best, row.until = self._known[key], step + STEPS

    def forget(self, request_id: str) -> None:
        self._rows.pop(request_id, None)

    def rate(self, proposer: int, worth: Worth, num_rows: int, context: int) -> float:
        """Tokens a second and row with as many guesses as bring most, if all num_rows rows had them."""
        target, draft = self._costs.target.at(context), self._costs.drafts[proposer].seconds
        gained, tokens, best = 1.0, 1.0, 0.0
        for depth, (accepted, made) in enumerate(zip(worth.accepted, worth.made, strict=True), 1):
            gained += accepted
            tokens += made
            best = max(best, gained / (target(num_rows * tokens) + draft(depth, num_rows)))
        return best
