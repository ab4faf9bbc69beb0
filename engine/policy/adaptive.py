"""Adaptive k: as many guesses for each row as pay, of the proposer that pays most, and none where none pays.

Weighs what guesses are expected to bring (expectations.py) against what they cost (costs.py), and learns from what they did. Decisions
never change an output: only how soon it is there.
"""

from collections.abc import Sequence

from ...proposers.base import Draft
from ..plan import RoundsAsked, RoundsPlan, RoundsVerdict, RowGrant, StepPlan, Verdict
from ..request import Request
from .acceptance import Worth
from .assignment import Assignment
from .balance import Balance
from .base import SLOWER, PolicyState, RequestLimits, StepTimes, Wish
from .costs import CostTable
from .draft_choice import Candidate, choose
from .drafted_rounds import DraftedRounds
from .expectations import Asked, Expectations
from .lessons import Lessons
from .probing import Probing
from .rounds_choice import RoundsChoice
from .scouting import Scouting
from .standing import HOLD, LISTEN_EVERY, NOBODY, SETTLED, Answer, listening_period
from .weighing import Weighing


class AdaptivePolicy:
    """Owner of what guesses are expected to bring and to cost."""

    def __init__(self, rules: RequestLimits, costs: CostTable) -> None:
        self.costs = costs
        self.expectations = Expectations(rules)
        self._rules = rules
        self._may_cut = rules.config.rejection_sample_method == "match"  # under the p/q rules what is drawn must be verified
        self._assignment = Assignment(rules, self.expectations.acceptance, costs)
        self._probing = Probing(self._assignment, self.expectations.acceptance, costs)
        self._scouting = Scouting(self._assignment, self.expectations, costs, self._probing)
        self._scouts = self._assignment.scouts.keys()
        self._rounds = RoundsChoice(self._assignment, self.expectations.acceptance, costs.passes, rules)
        self._drafted = DraftedRounds(costs, rules.round_drafter, rules.longest_unseen_s, rules.most_at_once)
        self._may_round = False  # as in `look`
        self._num_single = SETTLED  # steps in a row that were one pass
        self._lessons = Lessons(self.expectations, self._scouts)
        self._balance = Balance()
        self._weighing = Weighing(self.expectations, costs, self._assignment, self._probing, self._lessons, self._balance)
        self._step = 0
        self._is_resting = False  # in this step
        self._asked: dict[str, Asked] = {}
        self._answered: Answer | None = None  # the answer that it was made of, if it still is all there is to it
        self._was_open: dict[str, Asked] = {}
        self._has_scouted = False  # in this step, and guesses have come of it
        self._has_begun = False  # this step, without them
        self.has_left = False
        self._num_rested = 0  # steps in a row that nobody has guessed in
        self._k = 0.0

    def assign(self, request: Request) -> tuple[int, int]:
        return self._rules.assign(request)

    @property
    def threshold(self) -> int | None:
        """Only what is configured: the rest is decided step by step."""
        return self._rules.config.disable_by_batch_size

    def found_threshold(self, max_rows: int) -> int:
        """Running requests above which guessing does not pay at the acceptance known now; max_rows = it always pays."""
        for num_rows in range(1, max_rows + 1):
            for p, acceptance in enumerate(self.expectations.acceptance):
                if acceptance.depth:
                    candidate = Candidate(p, acceptance.depth, acceptance.expected())
                    if any(choose([candidate] * num_rows, num_rows, 0, 0, num_rows * acceptance.depth, self.costs).depths):
                        break
            else:
                return num_rows - 1
        return max_rows

    def look(self, running: Sequence[Request], has_begun: bool, may_round: bool) -> None:
        num_rows = len(running)
        self._has_begun, self.has_left, self._may_round = has_begun, False, may_round
        self._rounds.look(running, may_round)
        if self._rounds.most and not self._weighing.is_open:
            self._scouting.found.clear()  # rounds look everything up themselves
        elif self._scouting.looks(num_rows, self._step) or not self._weighing.rest.covers(num_rows):
            self._scouting.look(running)
        else:
            self._scouting.found.clear()

    def rests(self, num_rows: int) -> bool:
        return self._weighing.rest.covers(num_rows) and not self._scouting.found

    def likely(self, request: Request, room: int) -> int:
        asked = self._asked.get(request.request_id)
        return min(room, asked.ceiling if asked is not None else 0)

    def share(self, wishes: Sequence[Wish], budget: int) -> Answer:
        self._step += 1
        if self._weighing.rest.covers(len(wishes)) and not self._scouting.found:
            self._take_rest()
            return [NOBODY] * len(wishes)
        self._was_open, self._probing.probe = self._asked, None
        base = self._weighing.answer(wishes, budget, self._step, self._rounds.expected_rate, self._drafted if self._may_round else None)
        if self._rounds.most and not any([ceiling for _, ceiling in base]):
            self._scouting.found.clear()
        if len(self._lessons) >= HOLD:
            self._lessons.learn()
        if not self._weighing.rest.covers(len(wishes)):
            self._scouting.read_prompts(wishes)
        if self._has_begun:
            base = self._as_begun(base, wishes)
        may_add = budget > 0 and self._scouting.found and self._probing.probe is None
        answer = self._scouting.add_to(base, wishes, budget, self._step) if may_add else base
        if answer is not base and self._has_begun:
            # It would only be computed behind the step that has begun, and then that one may as well bring its token.
            self.has_left, answer, self._probing.probe = True, base, None
        self._has_scouted = answer is not base
        self._is_resting = self._weighing.is_resting and not self._has_scouted
        if answer is not self._answered:
            self._asked = {wish.request.request_id: Asked(p, k) for wish, (p, k) in zip(wishes, answer, strict=True) if k}
            self._k = sum([k for _, k in answer]) / max(1, len(answer))
            self._answered = answer
        if not self._asked:
            self._weighing.plain_at = self._step
        return answer

    def _as_begun(self, answer: Answer, wishes: Sequence[Wish]) -> Answer:
        """The answer for a step that has begun with the guesses of those who were asked in the one before. Others would be another step,
        behind that one: they wait for the next."""
        asked = [self._was_open.get(wish.request.request_id) for wish in wishes]
        is_new = [k > 0 and (one is None or one.proposer != p) for one, (p, k) in zip(asked, answer, strict=True)]
        if not any(is_new):
            return answer
        self.has_left = True
        probe = self._probing.probe
        if probe is not None and any(new and wish.request.request_id == probe.request_id for new, wish in zip(is_new, wishes, strict=True)):
            self._probing.probe = None
        return [NOBODY if new else said for new, said in zip(is_new, answer, strict=True)]

    def _take_rest(self) -> None:
        self._weighing.rest_again(self._step)
        self._is_resting, self._has_scouted, self._k, self._answered = True, False, 0.0, None
        if self._asked:
            self._asked = {}
        self._was_open, self._probing.probe = self._asked, None

    def rounds(self, running: Sequence[Request], most: int, ceilings: Sequence[int]) -> RoundsAsked | None:
        if not any(ceilings):
            return self._rounds.ask(running, most) if self._rounds.most else None
        if self._probing.probe is not None:
            return None  # a guess that is made for what it teaches is made once
        return self._drafted.ask(running, ceilings)

    def observe_rounds(self, plan: RoundsPlan, verdict: RoundsVerdict, seconds: float) -> None:
        # Decisions stand for so many passes, however they are divided into steps.
        num_more = len(verdict.tokens) - 1
        self._step += num_more
        self._num_single = 0
        self._weighing.rest.pass_by(num_more)
        self._lessons.learn()
        num_rows, committed = len(plan.rows), sum(len(said.token_ids) for said in verdict.rows)
        context = sum(row.num_computed for row in plan.rows)
        if plan.num_drafted:
            self._drafted.observe(plan, verdict, seconds)
            for row, said in zip(plan.rows, verdict.rows, strict=True):
                for draft in said.drafts:
                    self.expectations.learn_settled(row.request.request_id, draft, self._step)
            if not self.expectations.is_unproven(self._drafted.drafter):
                self._balance.settle(committed, self._weighing.promised_rate, seconds)
        else:
            self._rounds.observe(plan, verdict, seconds, self._step)
            self._k = self._rounds.k
        self._probing.earn(seconds)
        self._balance.add(self.costs.target.seconds(num_rows, context) * committed / num_rows, seconds)

    def cut(self, grants: Sequence[RowGrant], draft: Draft) -> Sequence[int] | None:
        """Drafts are made: they cost nothing more but their verification, and their real lengths and confidences are known."""
        if not self._may_cut:
            return None
        sizes = [end - start for start, end in zip(draft.start_loc, draft.start_loc[1:], strict=False)]
        if draft.confidence is None and all(size == grant.ceiling for size, grant in zip(sizes, grants, strict=True)):
            return None
        self._asked, self._answered = {**self._asked}, None  # steps that are not learnt from yet may have the same one
        probe = self._probing.probe
        places: list[int] = []
        candidates: list[Candidate] = []
        fixed = num_rows = num_prompt = context = 0
        for i, grant in enumerate(grants):
            context += grant.num_computed
            num_rows += grant.samples
            num_prompt += grant.num_scheduled - grant.samples
            request_id = grant.request.request_id
            asked = self._asked.get(request_id)
            if not sizes[i] or asked is None:
                continue
            start, end = draft.start_loc[i], draft.start_loc[i + 1]
            confidence = None if draft.confidence is None else draft.confidence[start:end]
            self._asked[request_id] = Asked(asked.proposer, asked.ceiling, sizes[i], confidence)
            chances = self.expectations.chances(request_id, draft, start, end)
            # What a drafter that nobody knows thinks of its guesses is not yet held against them: how else would it be known?
            doubts_itself = confidence is not None and self.expectations.is_unproven(asked.proposer)
            if chances is None or doubts_itself or (probe is not None and probe.request_id == request_id):
                fixed += sizes[i]
                continue
            places.append(i)
            candidates.append(Candidate(-1, sizes[i], Worth(chances, [1.0] * len(chances))))
        if not candidates:
            return None
        for i, depth in zip(places, choose(candidates, num_rows, num_prompt + fixed, context, sum(sizes), self.costs).depths, strict=True):
            sizes[i] = depth
        return sizes

    def observe(self, plan: StepPlan, verdict: Verdict, times: StepTimes) -> None:
        if self._is_resting:
            self._rested(plan, times.step)
            return
        self._num_rested = 0
        self._num_single += 1
        if self._has_scouted and self._scouting.stands:
            self._guessed_again(plan, verdict, times)
            return
        self._lessons.add(self._asked, plan, verdict, self._step)
        self._lessons.learn()
        num_tokens = num_rows = context = committed = 0
        is_decode = True
        for row, said in zip(plan.rows, verdict.rows, strict=True):
            num_tokens += row.num_tokens
            context += row.num_computed
            num_rows += row.samples
            committed += len(said.token_ids)
            is_decode = is_decode and row.num_scheduled == 1 and row.samples and said.error is None
        if not is_decode or times.step <= 0:
            return
        disturbance = self.costs.target.disturbance(num_tokens, context, times.step)
        # Else it has weighed everything, or finds the caches full of what rounds needed.
        if not self._weighing.has_closed(self._step) and self._num_single > SETTLED:
            self.costs.target.observe(num_tokens, context, times.step)
        plain = self.costs.target.seconds(num_rows, context)
        # Else some of it was catching up, which scouts need not.
        if all(request_id in self._was_open or asked.proposer in self._scouts for request_id, asked in self._asked.items()):
            self._observe_drafts(times.draft)
        drafting, weighing = sum(times.draft), self._weighing
        undisturbed_s = times.step / disturbance + drafting  # others that took a core would have done so anyway
        if self._asked and self._probing.probe is None:
            if self._has_scouted:
                self._scouting.balance.settle(committed, self._scouting.promised_rate, times.step + drafting)
            # What rounds promised says nothing of a step of one pass, and of who is unproven it was only hoped.
            elif not (weighing.promises_rounds or any([self.expectations.is_unproven(asked.proposer) for asked in self._asked.values()])):
                self._balance.settle(committed, weighing.promised_rate, undisturbed_s)
        alone = disturbance * plain * committed / num_rows if num_tokens > num_rows else times.step
        self._balance.add(alone, times.step + drafting)
        if self._rounds.expected_rate:
            plain = min(plain, num_rows / self._rounds.expected_rate)
        self._probing.pay(plan, verdict, undisturbed_s, plain, num_rows)
        if self._probing.probe is not None and not any(said.accepted for said in verdict.rows):
            weighing.confirm()

    def _guessed_again(self, plan: StepPlan, verdict: Verdict, times: StepTimes) -> None:
        """A step of scouts' guesses that were decided in an earlier one: what it teaches can wait until the next decision."""
        self._lessons.replace(self._asked, plan, verdict, self._step)
        seconds = times.step + sum(times.draft)
        self._probing.earn(seconds)
        committed = sum(len(said.token_ids) for said in verdict.rows)
        self._scouting.balance.settle(committed, self._scouting.promised_rate, seconds)
        if times.step <= 0 or any([row.num_scheduled > 1 for row in plan.rows]):
            return
        context, num_rows = sum([row.num_computed for row in plan.rows]), len(plan.rows)
        disturbance = self.costs.target.disturbance(plan.num_tokens, context, times.step)
        if self._step % LISTEN_EVERY == 0:
            self.costs.target.observe(plan.num_tokens, context, times.step)
            self._observe_drafts(times.draft)
        self._balance.add(disturbance * self.costs.target.seconds(num_rows, context) * committed / num_rows, seconds)

    def _rested(self, plan: StepPlan, seconds: float) -> None:
        """A step of a rest took so long."""
        self._probing.earn(seconds)
        self._num_rested += 1
        if seconds <= 0 or any([row.num_scheduled > 1 for row in plan.rows]):
            return
        self._balance.add(seconds, seconds)
        # A step behind one with guesses finds the caches full of other things: that is no measure of doing without.
        if self._num_rested > SETTLED and not self._weighing.rest.steps_left % listening_period(seconds):
            self.costs.target.observe(plan.num_tokens, sum([row.num_computed for row in plan.rows]), seconds)

    def forget(self, request_id: str) -> None:
        self._lessons.learn()
        self._scouting.forget(request_id)
        self._asked.pop(request_id, None)
        self._answered = None
        self._weighing.rest.forget(request_id)
        self._probing.forget(request_id)
        self._assignment.forget(request_id)
        self._rounds.forget(request_id)
        self.expectations.forget(request_id)

    @property
    def off(self) -> str | None:
        return None if self._asked or self._weighing.is_open or self._scouting.pays or self._rounds.most else SLOWER

    def state(self) -> PolicyState:
        return PolicyState(self._k, self._balance.speedup)

    def _observe_drafts(self, seconds: Sequence[float]) -> None:
        for p, spent in enumerate(seconds):
            asked = [a.ceiling for a in self._asked.values() if a.proposer == p]
            if asked:
                self.costs.drafts[p].observe(max(asked), len(asked), spent)
