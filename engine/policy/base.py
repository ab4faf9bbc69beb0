"""What decides how much to speculate, as seen by scheduler and core: one interface for fixed and adaptive k.

Owns the limits that the configuration and the requests set, which hold under either.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ...kernels.layout import MAX_TREE_TOKENS
from ...kernels.record import record
from ...proposers.base import Draft, Look
from ...proposers.config import SpeculativeConfig
from ..plan import RoundsAsked, RoundsPlan, RoundsVerdict, RowGrant, StepPlan, Verdict
from ..request import Request

PREDICTION = "prediction"
NO_PROPOSER, BATCH_SIZE, SLOWER = "no proposer configured", "batch size", "slower"
"""Why a step does not speculate: the closed set."""


@record
class StepLimits:
    """What holds for every row of one step."""

    max_tokens: int  # most draft tokens of one row
    off: str | None = None  # why nobody may guess; None = they may


@dataclass(frozen=True)
class ProposerInfo:
    """What the policy knows of one proposer of the set, in the set's order."""

    name: str
    max_tokens: int
    have_guesses: Look | None = None
    """Of a scout: told for next to nothing."""
    looks_in: Literal["text", "table"] | None = None
    """Of one that does no more than look in the row's own text, or in a table that never changes: a step in rounds can do that."""
    is_whole: bool = False  # as of `Needs`
    guesses_in_rounds: bool = False
    """Of a draft model whose network can be asked between the passes of one call."""
    most_at_once: int = 1  # of the target, as of `RoundsExecutor`


@record
class Wish:
    """A scheduled row that may want guesses."""

    request: Request
    num_scheduled: int
    room: int  # most guesses that the context and the step's limits leave; 0 if it does not reach its last known token
    depth: int = MAX_TREE_TOKENS  # most guesses behind one another: tokens that may still come, less the target's own

    @property
    def samples(self) -> bool:
        return self.request.num_computed_tokens + self.num_scheduled == len(self.request.token_ids)

    @property
    def chain(self) -> int:
        """Most guesses of a draft that does not branch."""
        return min(self.room, self.depth)


class Shape:
    """What was seen of one proposer's drafts."""

    __slots__ = ("branches",)

    def __init__(self) -> None:
        self.branches = False  # then guess i is the i-th node, and there may be more of them than tokens are still to come

    def see(self, is_chain: bool) -> None:
        self.branches = self.branches or not is_chain

    def most(self, wish: Wish) -> int:
        """Guesses of a draft."""
        return wish.room if self.branches else wish.chain


@record
class StepTimes:
    """How long a step took. Seconds; 0 = not measured."""

    step: float = 0.0  # from the schedule to the commit, without the proposers
    draft: tuple[float, ...] = ()  # per proposer, its listening to the step before included


@record
class PolicyState:
    """For people: what the policy thinks of the moment."""

    k: float = 0.0  # mean guesses asked for in the latest step, over the rows that could have some
    speedup: float | None = None  # estimated, against no speculation; None = unknown


class Policy(Protocol):
    """Chooses each row's proposer and ceiling. Never reads a clock: durations come with `observe`."""

    def assign(self, request: Request) -> tuple[int, int]:
        """(proposer to ask first, most guesses that make sense at all): (-1, 0) for a request that wants none."""
        ...

    @property
    def threshold(self) -> int | None:
        """Running requests above which nobody may guess; None = there is no such number."""
        ...

    def look(self, running: Sequence[Request], has_begun: bool, may_round: bool) -> None:
        """A step begins: who has a guess for these rows already?

        has_begun: as in Scheduler.schedule. may_round: it can be one in rounds, if nobody guesses.
        """
        ...

    @property
    def has_left(self) -> bool:
        """Whether guesses that pay were left for the next step, since this one had begun without them."""
        ...

    def rests(self, num_rows: int) -> bool:
        """Whether nobody may guess in this step because that was decided for several, and num_rows are so few that none can be new."""
        ...

    def likely(self, request: Request, room: int) -> int:
        """Guesses that the row will probably get, so that prompts leave room for them."""
        ...

    def share(self, wishes: Sequence[Wish], budget: int) -> list[tuple[int, int]]:
        """(proposer, ceiling) of each row of the step. Ceilings add up to the budget at most; -1 = no proposer sees the row."""
        ...

    def rounds(self, running: Sequence[Request], most: int, ceilings: Sequence[int]) -> RoundsAsked | None:
        """The step can be one in rounds: what it may do then. None: it is to be one pass.

        most: guesses of one row and round. ceilings: what the step's answer gives each row of a drafter that can guess in rounds; all 0 if
        nobody guesses.
        """
        ...

    def observe_rounds(self, plan: RoundsPlan, verdict: RoundsVerdict, seconds: float) -> None: ...

    def cut(self, grants: Sequence[RowGrant], draft: Draft) -> Sequence[int] | None:
        """Guesses of each made draft to verify; None = all of them."""
        ...

    def observe(self, plan: StepPlan, verdict: Verdict, times: StepTimes) -> None: ...

    def forget(self, request_id: str) -> None: ...

    @property
    def off(self) -> str | None:
        """Why nobody guesses of late, if it is the policy that does not want it."""
        ...

    def state(self) -> PolicyState: ...


class RequestLimits:
    """What configuration and request allow, whatever is worth while."""

    def __init__(self, config: SpeculativeConfig, proposers: Sequence[ProposerInfo], longest_unseen_s: float = 0.0) -> None:
        """longest_unseen_s: as in SchedulerConfig."""
        self.config = config
        self.longest_unseen_s = longest_unseen_s
        self.proposers = tuple(proposers)
        self.shapes = tuple(Shape() for _ in proposers)
        self._index = {p.name: i for i, p in enumerate(proposers)}
        self.default = next((i for i, p in enumerate(proposers) if p.name != PREDICTION), -1)
        self.prediction = self._index.get(PREDICTION, -1)
        self.text_lookup = next((i for i, p in enumerate(proposers) if p.looks_in == "text"), -1)
        self.table_lookup = next((i for i, p in enumerate(proposers) if p.looks_in == "table"), -1)
        self.round_drafter = next((i for i, p in enumerate(proposers) if p.guesses_in_rounds), -1)
        self.most_at_once = max((p.most_at_once for p in proposers), default=1)

    def limits(self, num_rows: int, threshold: int | None) -> StepLimits:
        """What num_rows running rows (prefilling ones count) may do. Exactly the threshold still speculates; None = there is none."""
        if self.config.off or not self.proposers:
            return StepLimits(0, NO_PROPOSER)
        if threshold is not None and num_rows > threshold:
            return StepLimits(0, BATCH_SIZE)
        for first, last, k in self.config.num_speculative_tokens_per_batch_size:
            if first <= num_rows <= last:
                return StepLimits(k, None if k else BATCH_SIZE)
        return StepLimits(max(p.max_tokens for p in self.proposers))

    def assign(self, request: Request) -> tuple[int, int]:
        """The first proposer that the request's own settings allow, and the most guesses of it and those behind it."""
        wanted = request.params.speculation_settings
        match wanted.method:
            case "off":
                return -1, 0
            case "auto" if request.prediction and PREDICTION in self._index:
                first = self._index[PREDICTION]
            case "auto":
                first = self.default
            case name:
                first = self._index.get(name, -1)
        if first < 0:
            return -1, 0
        # An empty draft falls through to the proposers behind, so the widest of them sets the ceiling.
        ceiling = max(p.max_tokens for p in self.proposers[first:])
        if wanted.num_speculative_tokens is not None:
            ceiling = min(ceiling, wanted.num_speculative_tokens)
        return (first, ceiling) if ceiling else (-1, 0)

    def options(self, request: Request) -> Sequence[int]:
        """Proposers that may be asked first: all, unless the request names one or has nothing for predictions."""
        first, ceiling = self.assign(request)
        if not ceiling:
            return ()
        if request.params.speculation_settings.method != "auto":
            return (first,)
        return [i for i, p in enumerate(self.proposers) if p.max_tokens and (p.name != PREDICTION or request.prediction)]
