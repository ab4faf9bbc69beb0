"""What guesses of each row should be made, weighed against what they cost: a decision, and how long it stands.

Scouts stand apart: what they find is decided in every step (scouting.py). What became of guesses is learnt elsewhere.
"""

from collections.abc import Sequence

from .assignment import Assignment
from .balance import Balance
from .base import Wish
from .costs import CostTable
from .draft_choice import MARGIN, Candidate, choose
from .drafted_rounds import DraftedRounds
from .expectations import Expectations
from .lessons import Lessons
from .load import Load
from .probing import Probing
from .standing import LONG_REST, NOBODY, SETTLED, Answer, Closed, Hold, Rest, is_dear

TRIAL_ROWS = 4  # rows that an unproven proposer may guess for in one step
PLAIN_EVERY = 200  # steps after which some go without guesses, to see what they are compared with
PLAIN_SOON = 10  # if the latest one was a surprise
PLAIN_RUN = SETTLED + 1  # more of them, so that the last one tells
LONG_PLAIN_RUN = 16  # where guessing gains little, so that what it is compared with must be right
LITTLE = 1.5  # times the plain rate
LEAVING = 1.25  # times the rate of rounds: who takes over must first read what they said, and finds the caches full of other things


class Weighing:
    """Of one engine."""

    def __init__(
        self, expectations: Expectations, costs: CostTable, assignment: Assignment, probing: Probing, lessons: Lessons, balance: Balance
    ) -> None:
        self._expectations = expectations
        self._costs = costs
        self._assignment = assignment
        self._probing = probing
        self._lessons = lessons
        self._balance = balance
        self.rest = Rest()
        self.is_resting = False  # in this step
        self.is_open = True  # whether guessing paid for anybody in the latest step that could tell
        self.promised_rate = 0.0  # tokens a second, by the latest decision
        self.promises_rounds = False  # whether it was weighed as one of a step in rounds
        self.plain_at = 0  # step of the latest one that was not meant to have guesses
        self._hold = Hold()
        self._closed = Closed()
        self._step = 0
        self._weighed_at = 0  # step of the latest decision

    def answer(
        self, wishes: Sequence[Wish], budget: int, step: int, rounds_rate: float | None, drafted: DraftedRounds | None
    ) -> Answer:
        """Without scouts. rounds_rate: as in RoundsChoice. drafted: if rounds may be in which a drafter guesses."""
        self._step = step
        self.is_resting = self.rest.covers(len(wishes)) or self.rest.admit(wishes) or self._stays_closed(wishes)
        if self.is_resting:
            self.rest.steps_left -= 1
            return [NOBODY] * len(wishes)
        if rounds_rate is not None and self._hold.take(wishes, budget):
            return self._hold.answer
        self.rest.end()
        self._hold.end()
        if self._passes_by(wishes):
            return [NOBODY] * len(wishes)
        self._weighed_at = step
        self._closed.end()
        if rounds_rate is None:  # nothing is decided by that but this step
            self.is_open = False
            self.rest.begin(_ids(wishes), 1)
            return [NOBODY] * len(wishes)
        return self._weighed(wishes, budget, rounds_rate, drafted)

    def rest_again(self, step: int) -> None:
        """One more step of a rest, in which nothing is asked."""
        self.rest.steps_left -= 1
        self.plain_at = step

    def has_closed(self, step: int) -> bool:
        """Whether it was in this step that everything was weighed and nobody was to guess."""
        return self.rest.steps_left > 0 and self._weighed_at == step

    def confirm(self) -> None:
        """A probe had nothing accepted."""
        if not self.is_open:
            self._closed.confirm(self._lessons.num_learnt)

    def _passes_by(self, wishes: Sequence[Wish]) -> bool:
        """Whether a step with prompts is left alone: if guessing has not paid lately, newcomers are weighed when they decode.

        Else each would have its prompt read by a drafter for nothing, and would rest through the first steps of its answer.
        """
        return not self.is_open and self._step - self._weighed_at < LONG_REST and any(wish.num_scheduled > 1 for wish in wishes)

    def _stays_closed(self, wishes: Sequence[Wish]) -> bool:
        """Whether another rest begins without a question: it would have the answer that it had, and no probe can be afforded."""
        if self.is_open or self._probing.is_due or not self._closed.covers(wishes, self._lessons.num_learnt, self._step, self._is_known):
            return False
        self.rest.begin(_ids(wishes))
        return True

    def _weighed(self, wishes: Sequence[Wish], budget: int, rounds_rate: float, drafted: DraftedRounds | None) -> Answer:
        """The answer for these rows, and how long it stands."""
        load, target = Load.of(wishes), self._costs.target
        answer, places, candidates = self._candidates(wishes, budget, load)
        if not candidates:
            if not any(self._assignment.row(wish.request).proposers for wish in wishes):
                self.is_open = False
                self.rest.begin(_ids(wishes))
            return answer
        in_rounds = None if drafted is None else drafted.costs([wish.request for wish in wishes])
        self.promises_rounds = in_rounds is not None
        choice = choose(candidates, load.num_rows, load.num_prompt, load.context, budget, self._costs, in_rounds)
        depths, self.promised_rate = choice.depths, choice.rate
        disappointment = self._balance.disappointment(load.num_rows / choice.plain_rate)
        if choice.rate < disappointment * MARGIN * max(choice.plain_rate, LEAVING * rounds_rate):
            depths = [0] * len(candidates)
        self.is_open = any(depths)
        every = PLAIN_SOON if target.in_doubt(load.num_rows + load.num_prompt) else PLAIN_EVERY
        is_due = self.is_open and self._step - self.plain_at > every
        if is_due or not self.is_open:
            self.plain_at = self._step
        # What is said of a step with prompts need not hold for those without.
        if not self.is_open and not load.num_prompt and is_dear(len(wishes), load.num_rows / choice.plain_rate):
            self._closed.begin(_ids(wishes), self._lessons.num_learnt, self._step, self._is_known)
        if is_due:
            depths = [0] * len(candidates)
        else:
            self._probing.try_one([wishes[i] for i in places], candidates, depths, load, budget, self._step)
        for i, candidate, depth in zip(places, candidates, depths, strict=True):
            if depth:
                answer[i] = (candidate.proposer, depth)
        if self.is_open:
            self.rest.be_short()
        if any(depths):
            if self._probing.probe is None and load.num_prompt == 0:
                self._hold.begin(wishes, answer, target.seconds(load.num_rows, load.context))
            return answer
        if is_due:
            self.rest.begin(_ids(wishes), PLAIN_RUN if choice.rate > LITTLE * choice.plain_rate else LONG_PLAIN_RUN)
        else:
            self.rest.begin(_ids(wishes))
            self._balance.forgive()
        return answer

    def _candidates(self, wishes: Sequence[Wish], budget: int, load: Load) -> tuple[Answer, list[int], list[Candidate]]:
        """Rows that may be guessed for, by whom and how much, and their places; and the answer for those that only keep up."""
        answer: Answer = [NOBODY] * len(wishes)
        places: list[int] = []
        candidates: list[Candidate] = []
        acceptances = self._expectations.acceptance
        trials = [0] * len(acceptances)
        self._assignment.begin_step()
        for i, wish in enumerate(wishes):
            row = self._assignment.row(wish.request)
            if not row.proposers:
                continue
            request_id = wish.request.request_id
            if wish.room <= 0 or budget <= 0:
                # Who reads a prompt must read it from the start, if the row is likely to be guessed for.
                if self.is_open:
                    self._assignment.choose(row, request_id, self._step, load.num_rows or 1, load.context)
                    answer[i] = row.proposer, 0
                continue
            self._assignment.choose(row, request_id, self._step, load.num_rows, load.context)
            acceptance = acceptances[row.proposer]
            if self._expectations.is_unproven(row.proposer):
                trials[row.proposer] += 1
                if trials[row.proposer] > TRIAL_ROWS:
                    continue
                worth = acceptance.hoped()
            else:
                worth = acceptance.worth(request_id)
            if ceiling := min(acceptance.shape.most(wish), row.ceiling):
                places.append(i)
                candidates.append(Candidate(row.proposer, ceiling, worth))
        return answer, places, candidates

    def _is_known(self, request_id: str) -> bool:
        """Whether anybody but scouts has guessed for that row."""
        acceptance = self._expectations.acceptance
        return any(one.last_step(request_id) >= 0 for p, one in enumerate(acceptance) if p not in self._assignment.scouts)


def _ids(wishes: Sequence[Wish]) -> list[str]:
    return [wish.request.request_id for wish in wishes]

