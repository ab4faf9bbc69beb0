"""Adaptive k: as many guesses for each row as pay, of the proposer that pays most, and none where none pays.

Weighs what guesses are expected to bring (acceptance.py) against what they cost (costs.py) in every step, and spends a
hundredth of the time on trying what seems not to pay. Decisions never change an output: only how soon it is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..proposers.base import Draft
from .acceptance import Calibration, ProposerAcceptance, Worth
from .costs import CostTable
from .draft_choice import MARGIN, Candidate, choose
from .plan import RowGrant, StepPlan, Verdict
from .request import Request
from .speculation_policy import SLOWER, PolicyState, RequestLimits, StepTimes, Wish

PROBE_SHARE = 0.01  # of the time, for guesses that are expected not to pay
MAX_SAVED_STEPS = 4.0  # of unspent probing, in steps
PROBE_DEPTH = 3  # of a closed row: enough to learn how chances go on
PROBE_DEEPER = 2  # of an open row
UNPROVEN = 16  # drafts before a proposer's average is worth the whole batch
LEARNT_ROWS = 32  # of a step, at most, teach something, in turn: as much is known then as the next step can use
TRIAL_ROWS = 4  # rows that an unproven proposer may guess for in one step
PLAIN_EVERY = 200  # steps after which some go without guesses, to see what they are compared with
PLAIN_SOON = 10  # if the latest one was a surprise
PLAIN_RUN = 1  # more of them: the first one follows a drafter that has emptied the processor's caches, and has weighed everything
LONG_PLAIN_RUN = 16  # where guessing gains little, so that what it is compared with must be right
LITTLE = 1.5  # times the plain rate
REST = 8  # steps for which "nobody guesses" stands unless the rows change: to ask costs time, too
LONG_REST = 32  # and when it was the answer again and again
LISTEN_EVERY = 4  # steps of a rest, its last one included: to listen costs time, too
HOLD = 4  # steps for which each row's number of guesses stands, likewise, where steps are short
CHOSEN_STEPS = 4  # for which a row's best proposer is not asked for again
WEIGHING_S = 30e-6  # seconds that it takes to ask for one row
DEAR = 0.05  # share of a step from which asking is worth avoiding
BELIEF = 0.98  # fade of what guessing was expected to take, and took, with each step
FORGIVEN = 0.8  # of both, that stays with each rest: things change
DOUBTED_STEPS = 8.0  # plain steps' time that has to be behind a disappointment
RECENT = 0.99  # fade of the speed-up's two sums with each step


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the latest step asked of a row."""

    proposer: int
    ceiling: int
    made: int | None = None  # guesses that came, if some of them were cut; None = as many as were verified
    confidence: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class _Probe:
    request_id: str
    seconds: float  # expected to be lost if nothing of it is kept
    usual: int  # guesses of the same proposer that it would have had anyway
    is_alone: bool  # nobody else guesses: then all drafting of the step is the probe's


@dataclass(slots=True)
class _Row:
    """What is known of a request: who may guess for it, how much, and who should."""

    options: Sequence[int]  # proposers
    ceilings: Sequence[int]  # of each
    best: int = 0  # index into them
    until: int = 0  # step from which that is asked again


class AdaptivePolicy:
    """Owner of acceptance estimates and costs, and of what probing may still spend."""

    def __init__(self, rules: RequestLimits, costs: CostTable, may_cut: bool = True) -> None:
        """may_cut: whether made drafts may be shortened. Not under the p/q rules, where what is drawn must be verified."""
        self.costs = costs
        self.acceptance = [ProposerAcceptance(p.max_tokens) for p in rules.proposers]
        self.calibration = [Calibration() for _ in rules.proposers]
        self._rules = rules
        self._may_cut = may_cut
        self._step = 0
        self._asked: dict[str, _Asked] = {}
        self._was_open: set[str] = set()
        self._probe: _Probe | None = None
        self._probed: dict[str, int] = {}  # request -> step of its latest probe
        self._rows: dict[str, _Row] = {}
        self._allowance = 0.0  # seconds that probes may lose
        self._is_open = True  # whether guessing paid for anybody in the latest step that could tell
        self._plain_at = 0  # step of the latest one that was not meant to have guesses
        self._is_resting = False
        self._rest = 0  # steps for which the latest "nobody guesses" still stands
        self._next_rest = REST
        self._resting: set[str] = set()  # for these rows
        self._hold = 0  # steps for which the latest answer still stands
        self._held: list[tuple[int, int]] = []
        self._held_rows: list[str] = []  # for these rows
        self._held_asked: dict[str, _Asked] = {}
        self._k = 0.0
        self._promised_rate = 0.0  # tokens a second that the latest answer promised
        self._promised = self._took = 0.0  # seconds that steps with guesses should have taken, and did
        self._plain_seconds = self._seconds = 0.0

    def assign(self, request: Request) -> tuple[int, int]:
        return self._rules.assign(request)

    def threshold(self, max_rows: int) -> int | None:
        """Only what is configured: the rest is decided step by step."""
        return self._rules.config.disable_by_batch_size

    def found_threshold(self, max_rows: int) -> int:
        """Running requests above which guessing does not pay at the acceptance known now; max_rows = it always pays."""
        for num_rows in range(1, max_rows + 1):
            for p, acceptance in enumerate(self.acceptance):
                if acceptance.depth:
                    candidate = Candidate(p, acceptance.depth, acceptance.expected())
                    if any(choose([candidate] * num_rows, num_rows, 0, 0, num_rows * acceptance.depth, self.costs).depths):
                        break
            else:
                return num_rows - 1
        return max_rows

    def rests(self, num_rows: int) -> bool:
        return self._rest > 0 and num_rows <= len(self._resting)  # rows that ended are no longer in there: as many means nobody new

    def likely(self, request: Request, room: int) -> int:
        asked = self._asked.get(request.request_id)
        return min(room, asked.ceiling if asked is not None else 0)

    def share(self, wishes: Sequence[Wish], budget: int) -> list[tuple[int, int]]:
        self._step += 1
        self._is_resting = self.rests(len(wishes))
        if self._is_resting:
            self._rest -= 1
            self._plain_at = self._step
            return [(-1, 0)] * len(wishes)
        if self._holds(wishes, budget):
            self._hold -= 1
            self._was_open, self._asked, self._probe = set(self._asked), dict(self._held_asked), None
            return self._held
        self._rest = self._hold = 0
        self._was_open, self._asked, self._probe, self._k = set(self._asked), {}, None, 0.0
        answer = [(-1, 0)] * len(wishes)
        num_rows = num_prompt = context = 0
        for wish in wishes:
            context += wish.request.num_computed_tokens
            if wish.samples:
                num_rows += 1
                num_prompt += wish.num_scheduled - 1
            else:
                num_prompt += wish.num_scheduled
        places: list[int] = []
        candidates: list[Candidate] = []
        trials = [0] * len(self.acceptance)
        rates: dict[tuple[int, ...], int] = {}  # most rows that nobody has guessed for yet are worth the same
        for i, wish in enumerate(wishes):
            row = self._row(wish.request)
            if not row.options:
                continue
            if wish.room <= 0 or budget <= 0:
                # Who reads a prompt must read it from the start, if the row is likely to be guessed for.
                if self._is_open:
                    answer[i] = row.options[self._best(row, wish.request.request_id, num_rows or 1, context, rates)], 0
                continue
            best = self._best(row, wish.request.request_id, num_rows, context, rates)
            proposer = row.options[best]
            ceiling = min(wish.room, row.ceilings[best])
            if self.acceptance[proposer].num_seen < UNPROVEN:
                if trials[proposer] >= TRIAL_ROWS:
                    ceiling = 0
                trials[proposer] += 1
            if ceiling > 0:
                places.append(i)
                candidates.append(Candidate(proposer, ceiling, self.acceptance[proposer].worth(wish.request.request_id)))
        if not candidates:
            return answer
        choice = choose(candidates, num_rows, num_prompt, context, budget, self.costs)
        depths, self._promised_rate = choice.depths, choice.rate
        if choice.rate < self._disappointment(choice.plain_rate, num_rows) * MARGIN * choice.plain_rate:
            depths = [0] * len(candidates)
        self._is_open = any(depths)
        every = PLAIN_SOON if self.costs.target.in_doubt(num_rows + num_prompt) else PLAIN_EVERY
        is_due = self._is_open and self._step - self._plain_at > every
        if is_due:
            depths = [0] * len(candidates)
        if is_due or not self._is_open:
            self._plain_at = self._step
        used = sum(depths)
        if not is_due and self._allowance > 0 and used < budget:
            self._try_one(wishes, places, candidates, depths, num_rows + num_prompt + used, context, budget - used)
        for i, candidate, depth in zip(places, candidates, depths, strict=True):
            if depth:
                answer[i] = (candidate.proposer, depth)
                self._asked[wishes[i].request.request_id] = _Asked(candidate.proposer, depth)
        self._k = sum(depths) / len(depths)
        if any(depths):
            self._next_rest = REST if self._is_open else self._next_rest
            is_dear = len(wishes) * WEIGHING_S > DEAR * self.costs.target.seconds(num_rows, context)
            if is_dear and self._probe is None and not is_due and num_prompt == 0:
                self._hold, self._held, self._held_asked = HOLD, answer, dict(self._asked)
                self._held_rows = [wish.request.request_id for wish in wishes]
        else:
            self._resting = {wish.request.request_id for wish in wishes}
            if is_due:
                self._rest = PLAIN_RUN if choice.rate > LITTLE * choice.plain_rate else LONG_PLAIN_RUN
            else:
                self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, LONG_REST)
                self._promised, self._took = FORGIVEN * self._promised, FORGIVEN * self._took
        return answer

    def cut(self, grants: Sequence[RowGrant], draft: Draft) -> Sequence[int] | None:
        """Drafts are made: they cost nothing more but their verification, and their real lengths and confidences are known."""
        if not self._may_cut:
            return None
        sizes = [end - start for start, end in zip(draft.start_loc, draft.start_loc[1:], strict=False)]
        if draft.confidence is None and all(size == grant.ceiling for size, grant in zip(sizes, grants, strict=True)):
            return None
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
            self._asked[request_id] = _Asked(asked.proposer, asked.ceiling, sizes[i], confidence)
            chances = self._chances(request_id, draft, start, end)
            if chances is None or (self._probe is not None and self._probe.request_id == request_id):
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
        if self._is_resting and self._rest % LISTEN_EVERY:  # nothing was asked, and some of these steps say what they cost
            self._allowance += PROBE_SHARE * times.step
            return
        num_tokens = num_rows = context = committed = 0
        is_decode = True
        num_asked = len(self._asked)
        turn = self._step * LEARNT_ROWS
        for row, said in zip(plan.rows, verdict.rows, strict=True):
            num_tokens += row.num_tokens
            context += row.num_computed
            num_rows += row.samples
            committed += len(said.token_ids)
            is_decode = is_decode and row.num_scheduled == 1 and said.error is None
            asked = self._asked.get(row.request.request_id)
            if asked is None:
                continue
            turn += 1
            if said.error is None and (num_asked <= LEARNT_ROWS or turn % num_asked < LEARNT_ROWS):
                self._learn(asked, row.request.request_id, row.draft_token_ids, row.parents, row.source, row.is_chain, said.accepted)
        if not is_decode or times.step <= 0:
            return
        if self._is_resting or not self._rest:  # the step that begins a rest has weighed everything; those that nobody guesses in have not
            self.costs.target.observe(num_tokens, context, times.step)
        plain = self.costs.target.seconds(num_rows, context)
        if all(request_id in self._was_open for request_id in self._asked):  # else some of it was catching up
            self._observe_drafts(times.draft)
        drafting = sum(times.draft)
        if self._asked and self._probe is None:
            self._promised = BELIEF * self._promised + committed / self._promised_rate
            self._took = BELIEF * self._took + times.step + drafting
        self._plain_seconds = RECENT * self._plain_seconds + plain * committed / num_rows
        self._seconds = RECENT * self._seconds + times.step + drafting
        self._allowance = min(self._allowance + PROBE_SHARE * (times.step + drafting), MAX_SAVED_STEPS * plain)
        probe = self._probe
        if probe is not None:
            said = (v for r, v in zip(plan.rows, verdict.rows, strict=True) if r.request.request_id == probe.request_id)
            kept = sum(len(verdict.accepted) for verdict in said)
            lost = max(probe.seconds, drafting) if probe.is_alone else probe.seconds
            self._allowance -= max(0.0, lost - max(0, kept - probe.usual) * (times.step + drafting) / committed)

    def forget(self, request_id: str) -> None:
        self._asked.pop(request_id, None)
        self._resting.discard(request_id)
        self._probed.pop(request_id, None)
        self._rows.pop(request_id, None)
        for acceptance in self.acceptance:
            acceptance.forget(request_id)

    def state(self) -> PolicyState:
        speedup = self._plain_seconds / self._seconds if self._seconds else None
        return PolicyState(self._k, None if self._asked or self._is_open else SLOWER, speedup)

    def _holds(self, wishes: Sequence[Wish], budget: int) -> bool:
        """Whether the latest answer stands: for the same rows, if there is still room for it."""
        if not self._hold or len(wishes) != len(self._held_rows):
            return False
        return sum(ceiling for _, ceiling in self._held) <= budget and all(
            wish.request.request_id == request_id and wish.num_scheduled == 1 and wish.room >= ceiling
            for wish, request_id, (_, ceiling) in zip(wishes, self._held_rows, self._held, strict=True)
        )

    def _disappointment(self, plain_rate: float, num_rows: int) -> float:
        """How much longer guessing took than it was expected to, lately: 1 = not at all.

        Estimates of costs and chances are each a little wrong, and in steps that hardly pay their errors decide.
        """
        doubt = DOUBTED_STEPS * num_rows / plain_rate
        return max(1.0, (self._took + doubt) / (self._promised + doubt))

    def _row(self, request: Request) -> _Row:
        row = self._rows.get(request.request_id)
        if row is None:
            options = self._rules.options(request)
            told = request.params.speculation_settings.num_speculative_tokens
            most = [self._rules.proposers[p].max_tokens for p in options]
            row = self._rows[request.request_id] = _Row(options, most if told is None else [min(k, told) for k in most])
        return row

    def _best(self, row: _Row, request_id: str, num_rows: int, context: int, known: dict[tuple[int, ...], int]) -> int:
        """The row's proposer with the most tokens a second if all rows were like it. known: answers of this step, by worths."""
        if len(row.options) == 1 or self._step < row.until:
            return row.best
        worths = [self.acceptance[p].worth(request_id) for p in row.options]
        key = tuple(map(id, worths))
        if key not in known:
            rates = [self._rate(p, worth, num_rows, context) for p, worth in zip(row.options, worths, strict=True)]
            known[key] = rates.index(max(rates))
        row.best, row.until = known[key], self._step + CHOSEN_STEPS
        return row.best

    def _rate(self, proposer: int, worth: Worth, num_rows: int, context: int) -> float:
        target, draft = self.costs.target.at(context), self.costs.drafts[proposer].seconds
        gained, tokens, best = 1.0, 1.0, 0.0
        for depth, (accepted, made) in enumerate(zip(worth.accepted, worth.made, strict=True), 1):
            gained += accepted
            tokens += made
            best = max(best, gained / (target(num_rows * tokens) + draft(depth, num_rows)))
        return best

    def _try_one(
        self,
        wishes: Sequence[Wish],
        places: Sequence[int],
        candidates: list[Candidate],
        depths: list[int],
        num_tokens: int,
        context: int,
        budget: int,
    ) -> None:
        """Let the row that has waited longest guess more than pays, or with another proposer, if the allowance bears it."""
        waited = [self._probed.get(wishes[i].request.request_id, -1) for i in places]
        j = min(range(len(places)), key=waited.__getitem__)
        request, candidate = wishes[places[j]].request, candidates[j]
        row = self._row(request)
        stale = min(row.options, key=lambda p: self.acceptance[p].last_step(request.request_id))
        proposer = stale if self._step % 2 or not depths[j] else candidate.proposer
        room = min(wishes[places[j]].room, row.ceilings[row.options.index(proposer)])
        depth = min(room, max(depths[j] + PROBE_DEEPER if depths[j] else PROBE_DEPTH, 1), depths[j] + budget)
        if depth <= depths[j] and proposer == candidate.proposer:
            self._probed[request.request_id] = self._step  # it guesses all it can already
            return
        target, drafts = self.costs.target.seconds, self.costs.drafts
        before = drafts[candidate.proposer].seconds(depths[j], 1) if proposer == candidate.proposer else 0.0
        seconds = target(num_tokens - depths[j] + depth, context) - target(num_tokens, context)
        seconds += drafts[proposer].seconds(depth, 1) - before
        if proposer != candidate.proposer:  # and what the better one would have brought
            seconds += sum(candidate.worth.accepted[: depths[j]]) * target(len(wishes), context) / len(wishes)
        if seconds > self._allowance:
            return
        is_alone = not any(depths)
        self._probed[request.request_id] = self._step
        usual = depths[j] if proposer == candidate.proposer else 0
        candidates[j] = Candidate(proposer, depth, candidate.worth)
        depths[j] = depth
        self._probe = _Probe(request.request_id, seconds, usual, is_alone)

    def _chances(self, request_id: str, draft: Draft, start: int, end: int) -> list[float] | None:
        """Of each guess of a made draft, to be kept; None = unknown, as of a tree whose drafter says nothing."""
        source = draft.source[start]
        if source < 0:
            return None  # forced by a grammar: certain
        parents = draft.parents[start:end]
        if draft.confidence is not None:
            chances: list[float] = []
            chance = self.calibration[source].chance
            for node, parent in enumerate(parents):
                chances.append(chance(draft.confidence[start + node]) * (chances[parent] if parent >= 0 else 1.0))
            return chances
        worth = self.acceptance[source].worth(request_id)
        if self.acceptance[source].is_tree or len(worth.accepted) < end - start:
            return None
        return [a / m if m > 0 else 0.0 for a, m in zip(worth.accepted[: end - start], worth.made, strict=False)]

    def _learn(
        self,
        asked: _Asked,
        request_id: str,
        draft: Sequence[int],
        parents: Sequence[int],
        sources: Sequence[int],
        is_chain: bool,
        accepted: Sequence[int],
    ) -> None:
        source = sources[0] if draft else asked.proposer
        if source < 0:
            return  # forced by a grammar: nobody's merit
        # What a drafter's own doubts cut off counts as never made: with their like left out, the rest would look better than all are.
        made = len(draft) if asked.made is None or asked.confidence is not None else asked.made
        if source != asked.proposer:  # that one had nothing, another one behind it did
            self.acceptance[asked.proposer].observe(request_id, asked.ceiling, 0, 0, (), True, self._step)
        wanted = asked.ceiling if source == asked.proposer else made
        self.acceptance[source].observe(request_id, wanted, made, len(draft), accepted, is_chain, self._step)
        if asked.confidence is not None:
            path = set(accepted)
            for node, parent in enumerate(parents):
                if parent < 0 or parent in path:
                    self.calibration[source].observe(asked.confidence[node], node in path)

    def _observe_drafts(self, seconds: Sequence[float]) -> None:
        for p, spent in enumerate(seconds):
            asked = [a.ceiling for a in self._asked.values() if a.proposer == p]
            if asked:
                self.costs.drafts[p].observe(max(asked), len(asked), spent)
