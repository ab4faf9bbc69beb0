"""All proposers as one: who is asked about which row, what their answers make together, and what a broken one may cost.

Owns the health of the proposers. Knows only the interface in base.py.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from .base import (
    BatchScout,
    ChainsAhead,
    Draft,
    DraftContext,
    DraftRow,
    EarlyProposer,
    Feedback,
    KnownRow,
    Look,
    Needs,
    Proposer,
    Scout,
    UnderWay,
)
from .corpus import Corpora
from .draft_merging import Guess, behind, fault_of, merged, taken

MAX_FAILURES_IN_A_ROW = 3
SLOW_CALL_S = 1.0
SLOW_TOKEN_S = 0.05  # more for each context token that a drafter was allowed to ingest in the call
_FAILURES = (Exception, SystemExit)  # whatever a proposer does costs its own guesses only

_log = logging.getLogger(__name__)


@dataclass
class ProposerHealth:
    """Totals of one proposer since the start."""

    name: str
    num_failures: int = 0
    draft_seconds: float = 0.0
    off_reason: str | None = None  # why it was switched off for good


@dataclass
class _Member:
    index: int
    proposer: Proposer
    health: ProposerHealth
    ingests: bool
    failures_in_a_row: int = 0  # steps, not calls: a step fails once, in propose or in observe
    failed_this_step: bool = False
    was_asked: bool = False  # in the running step

    @property
    def works(self) -> bool:
        return self.health.off_reason is None

    def hears(self, has_ended: bool) -> bool:
        match self.proposer.needs.hears:
            case "every step":
                return True
            case "own steps":
                return self.was_asked
            case "ends":
                return has_ended
            case "nothing":
                return False


@dataclass
class _Asking:
    """The state of one `propose`: how many tokens each row still wants, what it got, what drafters hold."""

    wanted: list[int]
    guesses: list[Guess | None]
    num_open: int  # rows that want tokens and have no guess yet
    filled: dict[tuple[int, str], int] = field(default_factory=dict)


class ProposerSet:
    """A row's assigned proposer is asked first, the ones behind it in the list if it has nothing.

    Where it is weighed step by step who guesses, a drafter with a cache of its own is not among those behind: to read along, so
    that it could step in at once, costs a pass of its network in every step. Assigned, it catches up. Nor is one that runs the target.

    A proposer that raises, answers with something that is no draft, or is slow loses its guesses of that call; after three
    such steps in a row it is off for good. Requests never notice more than lost speed.
    """

    def __init__(
        self,
        proposers: Sequence[Proposer],
        clock: Callable[[], float] = time.perf_counter,
        vocab_size: int | None = None,
        corpora: Corpora | None = None,
        is_weighed: bool = False,
    ) -> None:
        """clock: seconds; it measures calls. vocab_size: ids from here on are a proposer's fault; None = not checked.

        corpora: where proposers look up what others have said; the set fills them. None = nobody looks. is_weighed: see above.
        """
        self.proposers = tuple(proposers)
        self.corpora = corpora
        self._members = [_Member(i, p, ProposerHealth(p.name), p.needs.ingests) for i, p in enumerate(proposers)]
        self._listeners = [m for m in self._members if m.proposer.needs.hears != "nothing"]
        self._early = [(m, m.proposer) for m in self._members if isinstance(m.proposer, EarlyProposer) and m.proposer.num_places_ahead]
        self._clock = clock
        self._vocab_size = vocab_size
        self._is_weighed = is_weighed

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.proposers)

    @property
    def needs(self) -> Needs:
        """What all of them together want from the engine."""
        all_needs = [p.needs for p in self.proposers]
        return Needs(
            hidden=tuple(sorted({boundary for needs in all_needs for boundary in needs.hidden})),
            kv_layers=tuple(layer for needs in all_needs for layer in needs.kv_layers),
            scratch_slots=max((needs.scratch_slots for needs in all_needs), default=0),
            argmax=any(needs.argmax for needs in all_needs),
            runs_target=any(needs.runs_target for needs in all_needs),
        )

    @property
    def scouts(self) -> tuple[Look | None, ...]:
        """Of each proposer, if it is a scout."""
        found: list[Look | None] = []
        for member in self._members:
            match member.proposer:
                case BatchScout() as scout:
                    found.append(partial(self._have_guesses, member, scout.have_guesses))
                case Scout() as scout:
                    found.append(partial(self._have_guesses, member, partial(_row_by_row, scout)))
                case _:
                    found.append(None)
        return tuple(found)

    def listens(self, has_ended: bool) -> bool:
        """Whether anybody wants to hear of the step. has_ended: a request ended in it."""
        return (has_ended and self.corpora is not None) or any([member.hears(has_ended) for member in self._listeners])

    @property
    def ran_target(self) -> bool:
        """Whether somebody has done so in the latest `propose`."""
        return any([member.was_asked and member.proposer.needs.runs_target for member in self._members])

    @property
    def hears_every_step(self) -> bool:
        return any(p.needs.hears == "every step" for p in self.proposers)

    @property
    def num_ingesting(self) -> int:
        """Proposers that read every context token themselves."""
        return sum(p.needs.ingests for p in self.proposers)

    @property
    def draft_seconds(self) -> tuple[float, ...]:
        """Of each proposer since the start, in proposing and in listening."""
        return tuple(m.health.draft_seconds for m in self._members)

    def works(self, proposer: int) -> bool:
        """Whether that one has not been switched off."""
        return self._members[proposer].works

    def drafted(self, proposer: int, seconds: float) -> None:
        """That one has guessed without having been asked here, and it took so long."""
        self._members[proposer].health.draft_seconds += seconds

    def stats(self) -> tuple[ProposerHealth, ...]:
        return tuple(replace(m.health) for m in self._members)

    def propose(self, context: DraftContext) -> Draft:
        """One draft for all rows, in their order, none longer than its ceiling. Never raises for a proposer's fault."""
        rows = context.rows
        room = [row.ceiling if row.computed_after == len(row.token_ids) else 0 for row in rows]
        forced = [row.forced[:most] for row, most in zip(rows, room, strict=True)]
        # What fills the row's room already needs no proposer.
        wanted = [most if len(run) < most else 0 for run, most in zip(forced, room, strict=True)]
        asking = _Asking(wanted, [None] * len(rows), sum(most > 0 for most in wanted))
        first = min([row.assigned for row in rows], default=0)
        for member in self._members:
            member.was_asked = False
            if member.works and (member.ingests or (asking.num_open and first <= member.index)):
                self._ask(member, context, asking)
        return merged([behind(run, guess) for run, guess in zip(forced, asking.guesses, strict=True)], asking.filled, self._vocab_size)

    @property
    def num_places_ahead(self) -> int:
        """Places behind the known tokens of a step that those who begin early want to find; 0 = nobody does."""
        return max((early.num_places_ahead for _, early in self._early), default=0)

    @property
    def may_begin(self) -> bool:
        """Whether anybody who was asked in the running step can begin early what he will be asked behind it."""
        return any([member.was_asked and member.works for member, _ in self._early])

    def begin(self, step: UnderWay) -> ChainsAhead | None:
        """Let them. The time is nobody's: the target computes meanwhile. Who cannot do it guesses from now on when he is asked.

        Returns what was begun.
        """
        begun: list[ChainsAhead] = []
        for member, early in [*self._early]:
            if member.was_asked and member.works:
                try:
                    if (chains := early.begin(step)) is not None:
                        begun.append(chains)
                except _FAILURES as error:
                    member.health.num_failures += 1
                    self._early.remove((member, early))
                    _log.warning("proposer %s begins nothing early any more: %s", member.health.name, _told(error), exc_info=error)
        return ChainsAhead.of(begun) if begun else None

    def observe(self, feedback: Feedback) -> None:
        if self.corpora is not None:
            for ended in feedback.ended:
                self.corpora.add(ended.corpus_id, ended.token_ids, ended.request_id)
        has_ended = any(feedback.finished)
        for member in self._listeners:
            hears, was_asked, member.was_asked = member.hears(has_ended), member.was_asked, False
            if member.works and hears:
                started = self._clock()
                try:
                    member.proposer.observe(feedback)
                except _FAILURES as error:
                    self._failed(member, _told(error), error)
                seconds = self._clock() - started
                member.health.draft_seconds += seconds
                if was_asked and not member.ingests and seconds > SLOW_CALL_S:
                    self._failed(member, f"listening {_slow(seconds, SLOW_CALL_S)}")

    def forget(self, request_id: str) -> None:
        for member in self._members:  # those that are off too: they hold memory
            try:
                member.proposer.forget(request_id)
            except _FAILURES as error:
                self._failed(member, _told(error), error)

    def close(self) -> None:
        """Let every proposer finish what it writes, and save the corpora."""
        for member in self._members:
            try:
                member.proposer.close()
            except _FAILURES as error:
                self._failed(member, _told(error), error)
        if self.corpora is not None:
            self.corpora.save()

    def check(self) -> None:
        """Raise AssertionError if a working proposer's state is inconsistent."""
        if self.corpora is not None:
            self.corpora.check()
        for member in self._members:
            if member.works:
                member.proposer.check()

    def _have_guesses(self, member: _Member, ask: Look, rows: Sequence[KnownRow]) -> Sequence[bool]:
        if member.works:
            started = self._clock()
            try:
                if len(found := [bool(answer) for answer in ask(rows)]) != len(rows):
                    raise ValueError(f"it answered for {len(found)} rows of {len(rows)}")
                if (seconds := self._clock() - started) > SLOW_CALL_S:
                    raise TimeoutError(_slow(seconds, SLOW_CALL_S))
                return found
            except _FAILURES as error:
                member.failed_this_step = False  # asked for nothing in between, it counts each time
                self._failed(member, _told(error), error)
        return [False] * len(rows)

    def _ask(self, member: _Member, context: DraftContext, asking: _Asking) -> None:
        """Let one proposer answer for the rows that are its to answer, and take what is sound."""
        rows, last = context.rows, member.index
        ingests = member.ingests  # then it must see every row that it may ever guess for in every step, to keep up
        runs_target = member.proposer.needs.runs_target
        first = last if (ingests or runs_target) and self._is_weighed else 0
        mine = [
            first <= row.assigned <= last and wanted > 0 and guess is None
            for row, wanted, guess in zip(rows, asking.wanted, asking.guesses, strict=True)
        ]
        places = [i for i, row in enumerate(rows) if mine[i] or (ingests and first <= row.assigned <= last)]
        if not places:
            return
        shown = [_as_seen_by(member.index, rows[i], mine[i]) for i in places] if ingests else [rows[i] for i in places]

        member.was_asked = True
        if not member.failed_this_step:
            member.failures_in_a_row = 0
        member.failed_this_step = False
        raised: BaseException | None = None
        started = self._clock()
        try:
            draft = member.proposer.propose(DraftContext(shown, context.max_ingest_tokens, context.block_size))
            fault = fault_of(draft, len(shown), self._vocab_size)
        except _FAILURES as error:
            draft, fault, raised = Draft.empty(len(shown)), _told(error), error
        seconds = self._clock() - started
        member.health.draft_seconds += seconds
        # Nobody who waits for the target's passes minds one more that takes as long.
        limit = math.inf if runs_target else SLOW_CALL_S + (SLOW_TOKEN_S * context.max_ingest_tokens if ingests else 0.0)
        if fault is None:
            asking.filled.update({(member.index, request_id): n for (_, request_id), n in draft.filled.items()})
            if seconds > limit:
                fault = _slow(seconds, limit)
        if fault is not None:
            self._failed(member, fault, raised)
            return
        for place, i in enumerate(places):
            if mine[i] and (guess := taken(draft, place, asking.wanted[i], member.index)) is not None:
                asking.guesses[i] = guess
                asking.num_open -= 1

    def _failed(self, member: _Member, reason: str, raised: BaseException | None = None) -> None:
        """The first failure is told with the lines that raised it."""
        health = member.health
        health.num_failures += 1
        if not member.failed_this_step:
            member.failed_this_step = True
            member.failures_in_a_row += 1
        where = raised if health.num_failures == 1 else None
        _log.warning("proposer %s failed, its guesses are dropped: %s", health.name, reason, exc_info=where)
        if member.failures_in_a_row >= MAX_FAILURES_IN_A_ROW and health.off_reason is None:
            health.off_reason = f"failed {MAX_FAILURES_IN_A_ROW} steps in a row, lastly: {reason}"
            _log.error("proposer %s is off: it %s", health.name, health.off_reason)


def _as_seen_by(index: int, row: DraftRow, asked: bool) -> DraftRow:
    """The row for a drafter with its own cache: its own num_filled only, and nothing to guess if others serve the row."""
    return DraftRow(
        request_id=row.request_id,
        token_ids=row.token_ids,
        num_prompt_tokens=row.num_prompt_tokens,
        computed_after=row.computed_after,
        ceiling=row.ceiling if asked else 0,
        assigned=row.assigned,
        block_table=row.block_table,
        num_filled=row.num_filled[index : index + 1],
        draw=row.draw,
        prediction=row.prediction,
        forced=row.forced,
        corpus_id=row.corpus_id,
        num_computed=row.num_computed,
        adapter=row.adapter,
    )  # spelled out: dataclasses.replace takes three times as long, once a row and step


def _row_by_row(scout: Scout, rows: Sequence[KnownRow]) -> list[bool]:
    return [scout.has_guess(row) for row in rows]


def _slow(seconds: float, limit: float) -> str:
    return f"took {seconds:.1f} s, limit {limit:.1f} s"


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
