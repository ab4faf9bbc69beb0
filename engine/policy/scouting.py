"""Guesses of proposers that can say for next to nothing whether they have one: looked for in every step, whoever rests.

A decision that stands for some steps cannot know in which of them a text will repeat itself. Owns whether looking is worth its time, and
what such guesses promised and took; what they are expected to bring is in expectations.py.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..request import Request
from .assignment import Assignment, Scouts
from .balance import Balance
from .base import Wish
from .costs import CostTable
from .draft_choice import MARGIN, Candidate, choose
from .expectations import Expectations
from .load import Load
from .probing import Probing
from .standing import NOBODY, Answer, is_dear

LOOK_S = 10e-6  # seconds that it takes to look for one row, ...
DECIDE_S = 20e-6  # ... and to decide for one that something was found for, and to learn what became of it
MOST_DISAPPOINTMENT = 1.5  # a lone guess runs code that is in no cache, and may take twice what it does in a row of them
PATIENCE = 32  # steps in which nothing is found until one looks more rarely
STANDS = 8  # steps for which a decision does, where deciding takes long against a step, ...
REFUSAL_STANDS = 64  # ... and one against guesses, unless one can be tried before: nothing is learnt from those that are not made
SHARE = 0.005  # of the time that looking may take though nothing has come of it lately


@dataclass(slots=True)
class _Remembered:
    """A decision for a row, where deciding takes long against a step."""

    depth: int
    base: tuple[int, int]  # who else guessed for it then, and how much
    until: int  # step


_Case = tuple[list[str], Answer, list[tuple[int, int, int]], int, int]
"""All that an answer rests on where the decisions stand: rows, who guesses anyway, what was found, the budget, the estimates."""


@dataclass(slots=True)
class _Answered:
    """What was made of such decisions."""

    case: _Case
    answer: Answer
    until: int  # step
    is_whole: bool  # every row that something was found for guesses


class Scouting:
    """Of one engine."""

    def __init__(self, assignment: Assignment, expectations: Expectations, costs: CostTable, probing: Probing) -> None:
        self.balance = Balance(MOST_DISAPPOINTMENT)
        self.promised_rate = 0.0  # tokens a second, of the latest answer
        self._assignment = assignment
        self._expectations = expectations
        self._costs = costs
        self._probing = probing
        self.found: dict[str, Scouts] = {}  # those that have something, by request; of this step
        self.stands = False  # this step's answer was decided in an earlier one
        self._patience = PATIENCE  # steps for which one looks in vain
        self._remembers: dict[tuple[str, int], _Remembered] = {}  # by request and proposer
        self._latest: _Answered | None = None
        self._periods: dict[int, int] = {}  # by number of rows, steps of which one looks while it does not pay

    @property
    def pays(self) -> bool:
        """Whether something came of it lately."""
        return bool(self._assignment.scouts) and self._patience > 0

    def looks(self, num_rows: int, step: int) -> bool:
        """Whether to look in this step, though nothing else is decided in it: in all if it pays, else as often as costs next to nothing."""
        if self._patience > 0:
            return bool(self._assignment.scouts)
        if num_rows not in self._periods:
            self._periods[num_rows] = 1 + int(num_rows * LOOK_S / (SHARE * self._costs.target.seconds(num_rows)))
        return bool(self._assignment.scouts) and step % self._periods[num_rows] == 0

    def look(self, running: Sequence[Request]) -> None:
        """Find out who has a guess for rows that decode."""
        self.found.clear()
        self._patience -= bool(running)
        found, ask = self.found, self._assignment.scouts
        for scouts, requests in self._by_scouts([r for r in running if len(r.token_ids) - r.num_computed_tokens == 1]):
            for p, most in scouts:
                told, has = ((p, most),), ask[p](requests)
                for request_id in [request.request_id for request, it_has in zip(requests, has, strict=True) if it_has]:
                    found[request_id] = found[request_id] + told if request_id in found else told

    def read_prompts(self, wishes: Sequence[Wish]) -> None:
        """Let scouts read prompts while they are computed: such a step is long anyway, and the first token's need not wait for it."""
        ask = self._assignment.scouts
        if self.pays and (prompts := [wish.request for wish in wishes if wish.num_scheduled > 1]):
            for scouts, requests in self._by_scouts(prompts):
                for p, _ in scouts:
                    ask[p](requests)

    def _by_scouts(self, requests: list[Request]) -> Iterable[tuple[Scouts, list[Request]]]:
        """Rows that the same scouts may guess for."""
        row_of = self._assignment.row
        if len(requests) == 1:
            return [(row_of(requests[0]).scouts, requests)]
        groups: defaultdict[Scouts, list[Request]] = defaultdict(list)
        for request in requests:
            groups[row_of(request).scouts].append(request)
        return groups.items()

    def add_to(self, answer: Answer, wishes: Sequence[Wish], budget: int, step: int) -> Answer:
        """The answer, with the scouts' guesses where they bring more. At most budget guesses in all."""
        wanted = self._wanted(wishes)
        if not wanted:
            return answer
        case: _Case | None = None
        known, until = {}, -1
        if self._remembers:
            case = [wish.request.request_id for wish in wishes], answer, wanted, budget, self._expectations.revision
            if (latest := self._latest) is not None and step <= latest.until and latest.case == case:
                if latest.is_whole or not self._probing.is_due_for_found:
                    self.stands, self._patience = True, PATIENCE
                    return latest.answer
            known, until = self._remembered(wanted, answer, wishes, step)
        self.stands = until >= step
        if not self.stands:  # for all at once: decisions that end in different steps would be as many as steps
            self._latest = None
            known = self._decide(wanted, answer, wishes, budget, step)
        if not any([depth for _, depth in known.values()]):
            return answer
        if self._probing.probe is None:
            self._patience = PATIENCE
        extended = [*answer]
        budget -= sum([ceiling for place, (_, ceiling) in enumerate(answer) if ceiling and not known.get(place, NOBODY)[1]])
        for place, (p, depth) in known.items():
            if depth:
                depth = max(0, min(depth, budget))  # what stands was decided when there may have been more room
                extended[place] = (p, depth) if depth else NOBODY
                budget -= depth
        if self.stands and case is not None:
            self._latest = _Answered(case, extended, until, all(known.get(place, NOBODY)[1] for place, _, _ in wanted))
        return extended

    def _key(self, request_id: str, p: int) -> tuple[str, int]:
        """Of rows that nobody has guessed for yet one is what another is."""
        return (request_id if self._expectations.acceptance[p].last_step(request_id) >= 0 else "", p)

    def forget(self, request_id: str) -> None:
        self._latest = None
        for p in range(len(self._expectations.acceptance)):
            self._remembers.pop((request_id, p), None)

    def _decide(
        self, wanted: Sequence[tuple[int, int, int]], answer: Answer, wishes: Sequence[Wish], budget: int, step: int
    ) -> dict[int, tuple[int, int]]:
        """By place, (proposer, guesses)."""
        load = Load.of(wishes)
        found = self._best(wanted, answer, wishes, load)
        if not found:
            return {}
        taken = sum([ceiling for place, (_, ceiling) in enumerate(answer) if place not in found])
        candidates, budget = list(found.values()), budget - taken
        choice = choose(candidates, load.num_rows, load.num_prompt + taken, load.context, budget, self._costs)
        depths, self.promised_rate = choice.depths, choice.rate
        step_s = load.num_rows / choice.plain_rate
        effort = (len(wishes) * LOOK_S + len(candidates) * DECIDE_S) / step_s  # to be earned, too
        if choice.rate < self.balance.disappointment(step_s) * (MARGIN + effort) * choice.plain_rate:
            depths = [0] * len(candidates)
            self.balance.forgive()
        pays = any(depths)
        if not pays:
            self._patience = 0
        if is_dear(len(wishes), step_s):
            for place, candidate, depth in zip(found, candidates, depths, strict=True):
                key = self._key(wishes[place].request.request_id, candidate.proposer)
                self._remembers[key] = _Remembered(depth, answer[place], step + (STANDS if pays else REFUSAL_STANDS))
        if not pays and not any([ceiling for _, ceiling in answer]):
            self._probing.try_found([wishes[place] for place in found], candidates, depths, load, budget, step)
        return {place: (candidate.proposer, depth) for place, candidate, depth in zip(found, candidates, depths, strict=True)}

    def _remembered(
        self, wanted: Sequence[tuple[int, int, int]], answer: Answer, wishes: Sequence[Wish], step: int
    ) -> tuple[dict[int, tuple[int, int]], int]:
        """By place, (proposer, guesses) of decisions that still stand, and the last step for which they do: -1 if some row has none."""
        known: dict[int, tuple[int, int]] = {}
        undecided: set[int] = set()
        may_try, until = self._probing.is_due_for_found, step + REFUSAL_STANDS
        for place, p, ceiling in wanted:
            said = self._remembers.get(self._key(wishes[place].request.request_id, p))
            if said is None or said.until < step or said.base != answer[place] or (not said.depth and may_try):
                undecided.add(place)
                continue
            until = min(until, said.until)
            if place not in known or said.depth > known[place][1]:
                known[place] = p, min(said.depth, ceiling)
        return known, -1 if any(not known.get(place, NOBODY)[1] for place in undecided) else until

    def _wanted(self, wishes: Sequence[Wish]) -> list[tuple[int, int, int]]:
        """(place, proposer, ceiling) of all that was found and that there is room for."""
        wanted: list[tuple[int, int, int]] = []
        for place, wish in enumerate(wishes):
            if wish.num_scheduled == 1 and wish.room > 0:
                for p, most in self.found.get(wish.request.request_id, ()):
                    wanted.append((place, p, min(self._expectations.acceptance[p].shape.most(wish), most)))
        return wanted

    def _best(self, wanted: Sequence[tuple[int, int, int]], answer: Answer, wishes: Sequence[Wish], load: Load) -> dict[int, Candidate]:
        """By place, what brings most: of two scouts the better one, and none that brings less than who guesses there already."""
        best: dict[int, Candidate] = {}
        acceptance, rate = self._expectations.acceptance, self._assignment.rate
        for place, p, ceiling in wanted:
            request_id = wishes[place].request.request_id
            worth = acceptance[p].worth(request_id)
            rival, rival_worth = (best[place].proposer, best[place].worth) if place in best else (answer[place][0], None)
            if place in best or answer[place][1]:
                rival_worth = rival_worth or acceptance[rival].worth(request_id)
                if rate(p, worth, load.num_rows, load.context) <= rate(rival, rival_worth, load.num_rows, load.context):
                    continue
            best[place] = Candidate(p, ceiling, worth)
        return best
