"""The engine as a state machine: requests in, one step at a time, token deltas out. No asyncio, no clock, no globals."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from ..kernels.layout import ForwardOutput
from ..proposers.base import Draft, Feedback
from ..proposers.proposer_set import ProposerSet
from .committer import Committer
from .controller import Controller
from .plan import Grants, RoundsPlan, StepPlan, Verdict
from .policy.base import StepTimes
from .request import Request, TokenDelta, adapter_names
from .rounds import Rounds
from .runner import Runner
from .scheduler import Scheduler
from .stats import EngineStats
from .verifier import Verifier

logger = logging.getLogger("foretoken.engine")


class EngineCore:
    """One step is schedule -> propose -> settle -> forward -> verify -> commit -> observe."""

    def __init__(
        self,
        scheduler: Scheduler,
        proposers: ProposerSet,
        runner: Runner,
        verifier: Verifier,
        committer: Committer,
        controller: Controller,
        stopwatch: Callable[[], float] = time.perf_counter,
        on_close: Callable[[EngineCore], None] = lambda core: None,
        rounds: Rounds | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.proposers = proposers
        self._hears_nodes = proposers.needs.argmax
        self.runner = runner
        self.verifier = verifier
        self.committer = committer
        self.controller = controller
        self.rounds = rounds
        self.num_steps = 0
        self.step_seconds = 0.0
        self.target_seconds = 0.0
        self._on_close = on_close
        self._stopwatch = stopwatch  # measures durations: how much is guessed may depend on them, what is said does not
        self._now = 0.0
        self._proposing = 0.0  # seconds of the running step in proposers
        self._observing = 0.0  # seconds of learning from the step before, proposers' own aside: they are added to the running step's
        self._started = 0.0  # of the running step, by the stopwatch
        self._drafting = proposers.draft_seconds  # up to the last observed step
        self._no_drafting = (0.0,) * len(self._drafting)
        self._has_drafted = False  # since then: else nobody's time has changed

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add_request(self, request: Request) -> None:
        self.scheduler.add(request)

    def abort(self, request_id: str) -> TokenDelta | None:
        """End a request now; None if it is unknown or has ended already."""
        request = self.scheduler.requests.get(request_id)
        if request is None:
            return None
        delta = self.committer.abort(request)
        self._forget(request_id)
        return delta

    def step(self, now: float) -> list[TokenDelta]:
        """Advance every scheduled row. now: seconds, any monotonic clock. Never raises for one request's fault."""
        started = self._started = self._stopwatch()
        self._proposing = 0.0
        self._now = now
        grants = self.scheduler.schedule(now, self.runner.has_begun)
        deltas: list[TokenDelta] = []
        if grants.rows:
            deltas = self._run_rounds(grants, grants.rounds) if grants.rounds else self._run(grants, self._propose(grants))
            for delta in deltas:
                if delta.finish_reason is not None:
                    self._forget(delta.request_id)
        self.num_steps += 1
        self.step_seconds += self._stopwatch() - started
        return deltas

    def interrupt(self) -> None:
        """Somebody waits for the step to end. Any thread may call it."""
        if self.rounds is not None:
            self.rounds.interrupt()

    def resume(self) -> None:
        """Who waited until now is about to be served."""
        if self.rounds is not None:
            self.rounds.resume()

    def close(self) -> None:
        """No more steps: what is kept across restarts is written."""
        self.proposers.close()
        self._on_close(self)

    def stats(self, now: float | None = None) -> EngineStats:
        """A snapshot. now: as in `step`; None = when the latest step began."""
        kv, committer = self.scheduler.kv, self.committer
        health = {p.name: p for p in self.proposers.stats()}
        stats = self.controller.fill(
            EngineStats(
                num_running=len(self.scheduler.running),
                num_waiting=self.scheduler.num_waiting,
                running_adapters=adapter_names(self.scheduler.running),
                waiting_adapters=adapter_names(self.scheduler.waiting),
                kv_blocks_total=kv.pool.num_blocks,
                kv_blocks_used=kv.pool.num_blocks - kv.pool.num_free,
                num_steps=self.num_steps,
                num_preemptions=self.scheduler.num_preemptions,
                prompt_tokens=committer.prompt_tokens,
                cached_prompt_tokens=committer.cached_prompt_tokens,
                generation_tokens=committer.generation_tokens,
                prefix_cache_queries=kv.num_queried_tokens,
                prefix_cache_hits=kv.num_hit_tokens,
                step_seconds=self.step_seconds,
                target_seconds=self.target_seconds,
            ),
            self._now if now is None else now,
        )
        return stats.with_health(health)

    def check(self) -> None:
        """Raise AssertionError if any owner's state is inconsistent."""
        self.scheduler.kv.check()
        self.scheduler.check()
        self.committer.check()
        self.controller.check()
        self.proposers.check()
        if not self.has_work and not self.scheduler.kv.scratch:
            assert self.scheduler.kv.pool.num_free == self.scheduler.kv.pool.num_blocks, "blocks are held while nothing runs"

    def _propose(self, grants: Grants) -> Draft:
        if not grants.may_draft:
            return Draft.empty(len(grants.rows))
        before = sum(self.proposers.draft_seconds)
        self._has_drafted = True
        draft = self.proposers.propose(grants.draft_context())
        if self.proposers.ran_target:
            self.runner.drop_begun()
        self._proposing = sum(self.proposers.draft_seconds) - before
        return draft

    def _run(self, grants: Grants, draft: Draft) -> list[TokenDelta]:
        """The rest of the step. If the target or the verifier raises, the rows are tried again without a draft, then in halves.

        Nothing but the cache's uncommitted places was written before the commit, so a second try is safe; in the end only
        the row that breaks the step is failed.
        """
        plan = self.scheduler.settle(grants, draft)
        try:
            started = self._stopwatch()
            forward = self.runner.start(plan)
            if forward.answer is not None:
                chains = self.proposers.begin(plan.under_way(forward.answer, forward.hidden)) if self.proposers.may_begin else None
                self.runner.begin_next(plan, forward.answer, chains)
            target = forward.finish()
            self.target_seconds += self._stopwatch() - started
            verdict = self.verifier.verify(plan, target)
        except Exception as error:  # whose fault it was is found out below
            if plan.num_tokens > sum(row.num_scheduled for row in plan.rows):
                logger.warning("a step with guesses failed and is tried again without them", exc_info=error)
                return self._run(grants, Draft.empty(len(grants.rows)))
            return self._bisect(grants, error)
        return self._commit(plan, verdict, target)

    def _run_rounds(self, grants: Grants, plan: RoundsPlan) -> list[TokenDelta]:
        """The step as several passes in one call. If that raises, it is one pass after all."""
        assert self.rounds is not None
        try:
            started = self._stopwatch()
            verdict = self.rounds.run(plan)
            drafting = sum(verdict.draft_seconds)
            self.target_seconds += self._stopwatch() - started - drafting
        except Exception as error:  # whose fault it was is found out below
            self.rounds.failed()
            logger.warning("a step in rounds failed and is tried again as one pass", exc_info=error)
            return self._run(grants, Draft.empty(len(grants.rows)))
        self.num_steps += len(verdict.tokens) - 1
        if drafting:
            self.proposers.drafted(self.rounds.lookups.draft, drafting)
            self._drafting, self._has_drafted = self.proposers.draft_seconds, False  # no other step's
        deltas = self.committer.commit_rounds(plan, verdict)
        self.controller.observe_rounds(plan, verdict, self._now, self._stopwatch() - self._started + self._observing)
        started = self._stopwatch()
        listening = self._tell(deltas, lambda: verdict.feedback(plan))
        self._observing = self._stopwatch() - started - listening
        return deltas

    def _commit(self, plan: StepPlan, verdict: Verdict, target: ForwardOutput) -> list[TokenDelta]:
        deltas = self.committer.commit(plan, verdict)
        times = self._times()
        started = self._stopwatch()
        self.controller.observe(plan, verdict, self._now, times)
        listening = self._tell(deltas, lambda: verdict.feedback(plan, target, self._hears_nodes))
        self._observing = self._stopwatch() - started - listening
        return deltas

    def _tell(self, deltas: Sequence[TokenDelta], feedback: Callable[[], Feedback]) -> float:
        """Let the proposers hear of a step, if any wants to. Returns the seconds that they took."""
        if not self.proposers.listens(any([delta.finish_reason is not None for delta in deltas])):
            return 0.0
        self._has_drafted = True
        before = sum(self.proposers.draft_seconds)
        self.proposers.observe(feedback())
        return sum(self.proposers.draft_seconds) - before

    def _times(self) -> StepTimes:
        draft = self._no_drafting
        if self._has_drafted:
            drafting = self.proposers.draft_seconds
            draft = tuple(after - before for after, before in zip(drafting, self._drafting, strict=True))
            self._drafting, self._has_drafted = drafting, False
        return StepTimes(self._stopwatch() - self._started - self._proposing + self._observing, draft)

    def _bisect(self, grants: Grants, error: Exception) -> list[TokenDelta]:
        rows = grants.rows
        if len(rows) == 1:
            logger.error("request %s could not be computed", rows[0].request.request_id, exc_info=error)
            message = f"the engine could not compute this request ({type(error).__name__})"
            return [self.committer.fail(rows[0].request, message, "engine_error")]
        deltas: list[TokenDelta] = []
        for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
            part = Grants(half, 0, grants.block_size)
            deltas.extend(self._run(part, Draft.empty(len(half))))
        return deltas

    def _forget(self, request_id: str) -> None:
        self.proposers.forget(request_id)
        if self.rounds is not None:
            self.rounds.forget(request_id)
        self.verifier.forget(request_id)
        self.controller.forget(request_id)
