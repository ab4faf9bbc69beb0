"""Who runs in a step, with how many tokens and how many guesses. Owns the queues; asks the cache for places.

First come, first served inside a priority. The token budget is spent in this order: one token for every decoding row, then
the share kept for drafts, then prompt chunks. Guesses take free blocks only and never push anyone out.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from ..kernels.layout import MAX_TREE_TOKENS
from ..kernels.rounds import ALTERNATES_PER_GUESS
from ..proposers.base import Draft
from .config import SchedulerConfig
from .controller import Controller
from .kv_cache import KVCache
from .plan import Grants, PlanRow, RoundsPlan, RowGrant, RowRounds, StepPlan, scored_parts
from .plan_rows import plan_row
from .policy.base import StepLimits, Wish
from .prompt_logprobs import MAX_LOGITS_BYTES
from .request import Request, Status
from .rounds import Rounds


@dataclass(frozen=True)
class NetworkNeeds:
    """What target and drafters can take, and want of every step."""

    vocab_size: int  # the target's
    max_model_len: int
    num_ingesting: int = 0  # drafters that read every context token themselves
    scratch_slots: int = 0  # as in Needs
    lookahead: int = 0  # places that each row should have behind its tokens, ...
    guessing_lookahead: int = 0  # ... and those of one that may guess
    most_guesses: int = MAX_TREE_TOKENS  # of a row in a step, whoever makes them


class Scheduler:
    """Continuous batching under a token budget. `schedule` grants, `settle` fixes what runs."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCache,
        controller: Controller,
        needs: NetworkNeeds,
        on_preempt: Callable[[str], None] = lambda request_id: None,
        rounds: Rounds | None = None,
    ) -> None:
        self.config = config
        self.kv = kv
        self.controller = controller
        self.needs = needs
        self.running: list[Request] = []  # oldest first
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0
        self._waiting: list[tuple[int, float, int, Request]] = []  # ascending (priority, arrival, order of adding): next first
        self._order: dict[str, int] = {}
        self._counter = count()
        self._on_preempt = on_preempt
        self._rounds = rounds
        self._num_filled: dict[str, tuple[int, ...]] = {}
        self._scoring: set[str] = set()  # requests that want scores of their prompt
        self._score_cost = max(1, -(-4 * needs.vocab_size * config.max_num_batched_tokens // MAX_LOGITS_BYTES))  # in prompt tokens
        self._refused = ("", 0)  # the request that did not fit last, and the free blocks it saw

    @property
    def waiting(self) -> list[Request]:
        """Next first."""
        return [entry[3] for entry in self._waiting]

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self._waiting)

    @property
    def _may_join(self) -> bool:
        """Whether somebody waits whom the next step may admit."""
        if not self._waiting or len(self.running) >= self.config.max_num_seqs or not self.kv.has_seat:
            return False
        refused, num_free = self._refused
        return refused != self._waiting[0][3].request_id or self.kv.pool.num_free > num_free

    def add(self, request: Request) -> None:
        assert request.request_id not in self.requests, f"{request.request_id} is known already"
        self.requests[request.request_id] = request
        self._order[request.request_id] = next(self._counter)
        self._enqueue(request)

    def finish(self, request: Request) -> None:
        """Finished or aborted: gone from the queues, its blocks free."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self.kv.free(request.request_id)
        else:
            del self._waiting[bisect_left(self._waiting, self._key(request))]
        request.status = Status.FINISHED
        del self.requests[request.request_id]
        del self._order[request.request_id]
        self._num_filled.pop(request.request_id, None)
        self._scoring.discard(request.request_id)

    def schedule(self, now: float, has_begun: bool = False) -> Grants:
        """Rows of the next step. Every granted token and every ceiling has its place in the cache.

        has_begun: the step is computed already, as far as nothing changes. Newcomers wait for the next one: their prompts could only be
        computed behind it, and then it may as well bring its tokens.
        """
        config, controller, num_ingesting = self.config, self.controller, self.needs.num_ingesting
        # 1. May anyone guess? Count those who are about to be admitted too, so that no budget is set aside in vain.
        may_round = self._may_round()
        controller.look(self.running, has_begun, may_round)
        room = config.max_num_seqs - len(self.running)
        limits = controller.limits(len(self.running) + min(len(self._waiting), room))

        # 2. Split the budget: decoding rows, drafts, prompts. A prompt token costs one more for each drafter that reads it.
        decoding = [r for r in self.running if len(r.token_ids) - r.num_computed_tokens == 1]
        left = config.max_num_batched_tokens - len(decoding)
        draft_share = 0
        if limits.off is None:
            wanted = sum(controller.policy.likely(r, self._room(r, limits.max_tokens)) for r in decoding)
            draft_share = min(config.max_draft_tokens_per_step, wanted, left // 2)
        prompt_budget = (left - draft_share) // (1 if limits.off else 1 + num_ingesting)
        prompt_budget = max(prompt_budget, min(left, 1))  # however small the budget is, prompts get on

        # 3. Running rows, oldest first; whoever finds no block pushes out the newest.
        scheduled: dict[str, int] = {}
        num_running = len(self.running)
        for request in list(self.running):
            if request.status is not Status.RUNNING:
                continue  # pushed out a moment ago
            remaining = len(request.token_ids) - request.num_computed_tokens
            num_new, spent = (1, 0) if remaining == 1 else self._chunk(request, remaining, prompt_budget)
            if num_new and self._reserve(request, request.num_computed_tokens + num_new):
                scheduled[request.request_id] = num_new
                prompt_budget -= spent

        # 4. Newcomers, while there is budget and their whole known text would fit; none into a cache that just overflowed.
        overflowed = len(self.running) < num_running
        is_closed = overflowed or (has_begun and bool(scheduled))
        while not is_closed and self._waiting and len(self.running) < config.max_num_seqs and prompt_budget > 0:
            request = self._waiting[0][3]
            if not self._admit(request):
                break
            del self._waiting[0]
            if request.first_scheduled_time is None:
                request.first_scheduled_time = now
            num_new, spent = self._chunk(request, len(request.token_ids) - request.num_computed_tokens, prompt_budget)
            reserved = self.kv.reserve(request.request_id, request.num_computed_tokens + num_new)
            assert reserved, "admission promised places that are not there"
            scheduled[request.request_id] = num_new
            prompt_budget -= spent

        # 5. Ceilings, from what is left.
        limits = controller.limits(len(self.running))
        num_scheduled = sum(scheduled.values())
        draft_left = 0
        if limits.off is None:
            # A drafter that may not read at least a token of each row can never guess for all of them: that goes before guesses.
            unread = config.max_num_batched_tokens - num_scheduled - num_ingesting * len(scheduled)
            draft_left = max(0, min(config.max_draft_tokens_per_step, unread))
        rows = self._grant(scheduled, limits, draft_left)
        num_drafts = sum(row.ceiling for row in rows)
        ingest = 0
        if limits.off is None and num_ingesting and any(row.assigned >= 0 for row in rows):
            ingest = max(0, config.max_num_batched_tokens - num_scheduled - num_drafts) // num_ingesting
        may_round = may_round and len(rows) == num_running and not controller.policy.has_left
        rounds = self._in_rounds(rows) if may_round and (num_drafts or not ingest) else None
        return Grants(rows, ingest, self.kv.block_size, not (self._may_join or controller.policy.has_left), rounds)

    def settle(self, grants: Grants, draft: Draft) -> StepPlan:
        """What runs: every draft cut to its grant and checked, places that nobody needs given back."""
        rows: list[PlanRow] = []
        vocab_size = self.needs.vocab_size
        kept: list[int] = []  # flat draft indices that stay, for draft.probs
        worth_while = self.controller.cut(grants.rows, draft) if draft.start_loc[-1] else None
        for index, grant in enumerate(grants.rows):
            most = grant.ceiling if worth_while is None else min(grant.ceiling, worth_while[index])
            known = grant.num_computed + grant.num_scheduled
            state = self.kv.row_state(grant.request.request_id, grant.num_computed, known, grant.samples)
            row, nodes = plan_row(grant, draft, index, most, vocab_size, state)
            rows.append(row)
            if draft.probs is not None:
                kept.extend(draft.start_loc[index] + node for node in nodes)
            if grant.ceiling > len(nodes):
                self.kv.roll_back(grant.request.request_id, keep=grant.num_computed + grant.num_scheduled + len(nodes))
        scored = scored_parts(rows) if self._scoring else ()
        probs = None if draft.probs is None else draft.probs[kept]
        return StepPlan(rows, grants.block_size, probs, draft.filled, scored, grants.is_steady)

    def check(self) -> None:
        """Raise if a request stands in two queues or in none, or a table belongs to nobody."""
        for request in self.running:
            assert request.status is Status.RUNNING, f"{request.request_id} runs but is {request.status}"
            committed = self.kv.tables[request.request_id].num_committed
            assert committed == request.num_computed_tokens, f"{request.request_id}: the cache counts {committed} tokens as final"
        for request in self.waiting:
            assert request.status is Status.WAITING, f"{request.request_id} waits but is {request.status}"
            assert request.num_computed_tokens == 0, f"{request.request_id} waits with computed tokens"
        ids = sorted(r.request_id for r in [*self.running, *self.waiting])
        assert ids == sorted(self.requests), "a request is lost or queued twice"
        assert {r.request_id for r in self.running} == self.kv.tables.keys() - self.kv.scratch, "tables and running requests differ"
        assert len(self.running) <= self.config.max_num_seqs, "more rows than max_num_seqs"
        keys = [self._key(r) for r in self.running]
        assert keys == sorted(keys), "running rows are not oldest first"
        queued = [entry[:3] for entry in self._waiting]
        assert queued == sorted(queued), "the queue is out of order"

    def _key(self, request: Request) -> tuple[int, float, int]:
        return request.priority, request.arrival_time, self._order[request.request_id]

    def _enqueue(self, request: Request) -> None:
        request.status = Status.WAITING
        insort(self._waiting, (*self._key(request), request))

    def _admit(self, request: Request) -> bool:
        """Open a table for the request if all its known tokens fit into free blocks now; else leave it waiting."""
        kv, request_id = self.kv, request.request_id
        if not kv.has_seat:
            return False
        if self._refused[0] == request_id and kv.pool.num_free <= self._refused[1]:
            return False  # nothing was freed since: do not hash its text anew in every step
        queried, hit = kv.num_queried_tokens, kv.num_hit_tokens
        known: Sequence[int] = request.token_ids
        if (said := request.prompt_logprobs) is not None and not said.complete:
            known = known[: said.num_scored + 1]  # what is to be scored must be computed, whatever the cache has
            self._scoring.add(request_id)
        adapter = 0 if request.adapter is None else request.adapter.number
        cached = kv.admit(request_id, known, request.cache_salt, adapter)
        has_room = kv.blocks_for(len(request.token_ids)) - kv.blocks_for(cached) <= kv.pool.num_free
        if not has_room or request.num_preemptions:
            kv.num_queried_tokens, kv.num_hit_tokens = queried, hit  # a prompt counts once, and what it finds of itself is no hit
        if not has_room:
            kv.free(request_id)
            self._refused = (request_id, kv.pool.num_free)
            return False
        request.num_computed_tokens = cached
        if request.num_preemptions == 0:
            request.num_cached_tokens = cached
        self._num_filled[request_id] = tuple(kv.num_filled(request_id, i) for i in range(len(self.controller.proposers)))
        request.status = Status.RUNNING
        # A request of higher priority can be admitted behind newer ones: keep the list oldest first.
        self.running.append(request)
        if len(self.running) > 1 and self._key(self.running[-2]) > self._key(request):
            self.running.sort(key=self._key)
        return True

    def _chunk(self, request: Request, remaining: int, budget: int) -> tuple[int, int]:
        """Known tokens to compute now, and what they take of the budget: whole logits of each cost more, in memory."""
        said = request.prompt_logprobs
        if said is None or said.complete:
            return min(remaining, budget), min(remaining, budget)
        num_new = min(remaining, -(-budget // self._score_cost))
        return num_new, min(num_new * self._score_cost, budget)

    def _reserve(self, request: Request, num_places: int) -> bool:
        """Places for the row, pushing out the newest rows if need be. False if the row itself was the newest."""
        while not self.kv.reserve(request.request_id, num_places):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Take back all its blocks; it computes everything anew when its turn comes, with the same result."""
        self.running.remove(request)
        self.kv.free(request.request_id)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._on_preempt(request.request_id)
        self._enqueue(request)

    def _room(self, request: Request, max_tokens: int) -> int:
        """Draft tokens that the context leaves, if more than the target's own may still come: k guesses yield up to k + 1 tokens."""
        if self._most_new(request) < 2:
            return 0
        return min(self.needs.max_model_len - len(request.token_ids) - 1, max_tokens, self.needs.most_guesses)

    def _most_new(self, request: Request) -> int:
        """Tokens that may still come."""
        return min(request.max_tokens - request.num_output_tokens, self.needs.max_model_len - len(request.token_ids))

    def _grant(self, scheduled: dict[str, int], limits: StepLimits, budget: int) -> list[RowGrant]:
        """Rows with the controller's ceilings, as far as free blocks go."""
        kv, scratch_slots, lookahead = self.kv, self.needs.scratch_slots, self.needs.lookahead
        wishes: list[Wish] = []
        for request in self.running:
            if request.request_id in scheduled:
                num_new = scheduled[request.request_id]
                reaches_end = request.num_computed_tokens + num_new == len(request.token_ids)
                room = self._room(request, limits.max_tokens) if reaches_end and budget else 0
                wishes.append(Wish(request, num_new, room, max(0, self._most_new(request) - 1)))
        rows: list[RowGrant] = []
        most_ahead = max(lookahead, self.needs.guessing_lookahead)
        shares = self.controller.share(wishes, limits, budget)
        unused = budget - sum(ceiling for _, ceiling in shares)
        for wish, (assigned, ceiling) in zip(wishes, shares, strict=True):
            request = wish.request
            request_id = request.request_id
            forced = self._forced(wish, ceiling + unused)
            if len(forced) > ceiling:
                unused -= len(forced) - ceiling
                ceiling = len(forced)
            if ceiling > 0:
                known = len(request.token_ids)
                places = kv.reserve_up_to(request_id, known + ceiling + scratch_slots)
                ceiling = max(0, min(ceiling, places - known - scratch_slots))
            if most_ahead:
                ahead = most_ahead if ceiling > 0 else lookahead
                kv.look_ahead(request_id, request.num_computed_tokens + wish.num_scheduled, ahead)
            rows.append(
                RowGrant(
                    request,
                    request.num_computed_tokens,
                    wish.num_scheduled,
                    ceiling,
                    assigned,
                    kv.block_table(request_id),
                    self._num_filled[request_id],
                    forced[:ceiling],
                )
            )
        return rows

    def _may_round(self) -> bool:
        """Whether the step can be one in rounds, as far as that is not up to those who guess: all rows decode, nobody can join, nothing has
        to be seen in between."""
        if self._rounds is None or not self.running or (self._waiting and len(self.running) < self.config.max_num_seqs):
            return False
        takes = self._rounds.takes
        return all([len(r.token_ids) - r.num_computed_tokens == 1 and self._most_new(r) > 0 and takes(r) for r in self.running])

    def _in_rounds(self, rows: Sequence[RowGrant]) -> RoundsPlan | None:
        """Of rows that nobody guesses for, or only who can do it within the call. Their places come from free blocks only."""
        assert self._rounds is not None
        if not all([self._rounds.drafts(row) for row in rows if row.ceiling]):
            return None
        if (asked := self.controller.rounds(self.running, [row.ceiling for row in rows])) is None:
            return None
        planned: list[RowRounds] = []
        share = max(1, self.kv.pool.num_free // len(rows)) * self.kv.block_size
        for row, lookups in zip(rows, asked.lookups, strict=True):
            known, k, most_new = row.num_computed + 1, lookups.k, self._most_new(row.request)
            # Places for half of all guesses: more may push prefixes out of the cache that are worth more than one step's end.
            wanted = max(row.ceiling, min(asked.most_rounds * (2 + k) // 2 + k, most_new, share))
            beside = min(ALTERNATES_PER_GUESS * lookups.draft_k, self.controller.rules.most_at_once - 1)
            places = self.kv.reserve_up_to(row.request.request_id, known + wanted + beside)
            planned.append(RowRounds(row.request, row.num_computed, max(places, known), most_new, row.block_table, lookups))
        return RoundsPlan(planned, asked.most_rounds, asked.most_seconds, bool(self._waiting), asked.prices)

    def _forced(self, wish: Wish, limit: int) -> list[int]:
        """What the row's grammar leaves no choice about. Such guesses are free of doubt, so they come on top of its share."""
        request = wish.request
        if request.grammar is None or wish.room <= 0 or not self.controller.assign(request)[1]:
            return []
        return request.grammar.forced(min(limit, wish.depth, self._room(request, MAX_TREE_TOKENS)))
