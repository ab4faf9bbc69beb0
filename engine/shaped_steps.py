"""Steps of a told shape: so many rows with so many guesses each behind a text of a told length, and what the core says of them.

For measuring only. Knows no clock; what is measured, and how often, is up to the caller.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from ..kernels.layout import MAX_TREE_TOKENS
from ..proposers.base import Draft, DraftContext, Feedback, Needs
from .core import EngineCore
from .plan import RoundsAsked, RoundsPlan, RoundsVerdict, RowGrant, StepPlan, Verdict
from .policy.base import PolicyState, StepTimes, Wish
from .request import Request, SamplingParams

PREDICTION_LENGTH = 64
MOST_GROWTH = 64  # tokens of a row, before it counts as another one


@dataclass(frozen=True, slots=True)
class Sample:
    """One step, as the core told it."""

    num_tokens: int
    seconds: float  # without the proposers
    draft_seconds: float

    @property
    def whole_s(self) -> float:
        return self.seconds + self.draft_seconds


class _Shape:
    """The policy of a measurement: asks for exactly what is to be measured, and keeps what the core says of it."""

    off: str | None = None
    threshold: int | None = None
    has_left = False

    def __init__(self, verifies: bool) -> None:
        """verifies: whether made guesses go to the target. If drafting is to be measured, they would only cost time."""
        self.depths: Sequence[int] = ()  # guesses of each row of the next step
        self.latest: Sample | None = None  # None: there was no step of that shape, or not without a fault
        self._verifies = verifies
        self._fits = False

    def assign(self, request: Request) -> tuple[int, int]:
        return 0, MAX_TREE_TOKENS

    def look(self, running: Sequence[Request], has_begun: bool, may_round: bool) -> None: ...

    def rounds(self, running: Sequence[Request], most: int, ceilings: Sequence[int]) -> RoundsAsked | None:
        return None

    def observe_rounds(self, plan: RoundsPlan, verdict: RoundsVerdict, seconds: float) -> None: ...

    def rests(self, num_rows: int) -> bool:
        return False

    def likely(self, request: Request, room: int) -> int:
        return 0

    def share(self, wishes: Sequence[Wish], budget: int) -> list[tuple[int, int]]:
        self._fits = len(wishes) == len(self.depths) and sum(self.depths) <= budget and all(wish.samples for wish in wishes)
        self._fits = self._fits and all(depth <= wish.chain for depth, wish in zip(self.depths, wishes, strict=True))
        return [(0, depth) for depth in (self.depths if self._fits else [0] * len(wishes))]

    def cut(self, grants: Sequence[RowGrant], draft: Draft) -> Sequence[int] | None:
        self._fits = self._fits and [grant.ceiling for grant in grants] == list(self.depths)  # else there was no room in the cache
        return None if self._verifies else [0] * len(grants)

    def observe(self, plan: StepPlan, verdict: Verdict, times: StepTimes) -> None:
        if self._fits and all(said.error is None for said in verdict.rows):
            self.latest = Sample(plan.num_tokens, times.step, sum(times.draft))

    def forget(self, request_id: str) -> None: ...

    def state(self) -> PolicyState:
        return PolicyState()


class Filler:
    """Guesses as much as it may, at no cost and wrongly: the step gets its number of tokens.

    It says what the row has said backwards, each row from elsewhere: networks with experts take longer over different tokens.
    """

    name = "filler"
    needs = Needs()
    max_tokens = MAX_TREE_TOKENS - 1

    def propose(self, context: DraftContext) -> Draft:
        guesses = [
            [row.token_ids[-(place * row.ceiling + i) % len(row.token_ids)] for i in range(row.ceiling)]
            for place, row in enumerate(context.rows)
        ]
        return Draft.chains(guesses)

    def observe(self, feedback: Feedback) -> None: ...
    def forget(self, request_id: str) -> None: ...
    def check(self) -> None: ...
    def close(self) -> None: ...


class ShapedSteps:
    """A core whose every step is told its shape. All rows say the same text: they share its blocks, and only the first computes it."""

    def __init__(
        self, core: EngineCore, text: Sequence[int], after_step: Callable[[], None], verifies: bool = True, temperature: float = 0.0
    ) -> None:
        self.core = core
        self.text = text
        self._params = SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=None)
        self._shape = core.controller.policy = _Shape(verifies)
        self._after_step = after_step
        self._numbers = count()
        self._ids: list[str] = []

    def start(self, num_rows: int, context: int) -> None:
        """So many rows behind `context` tokens: those that run if they are as many and hardly longer, else fresh ones after a step."""
        running = self.core.scheduler.running
        if len(running) == num_rows and all(0 < r.num_computed_tokens - context <= MOST_GROWTH for r in running):
            return
        self.stop()
        prompt, prediction = self.text[: context + 1], self.text[:PREDICTION_LENGTH]
        for _ in range(num_rows):
            request_id = f"cost-measurement-{next(self._numbers)}"
            self._ids.append(request_id)
            self.core.add_request(Request(request_id, prompt, self._params, 0.0, len(self.text), seed=0, prediction=prediction))
        self.step([0] * num_rows)

    def step(self, depths: Sequence[int]) -> Sample | None:
        """One step with so many guesses of each row."""
        self._shape.depths, self._shape.latest = depths, None
        self.core.step(0.0)
        self._after_step()
        return self._shape.latest

    def stop(self) -> None:
        for request_id in self._ids:
            self.core.abort(request_id)
        self._ids.clear()

    def lengthen(self, context: int) -> None:
        """Make the cache hold the text's first `context` tokens by copying its first block: what stands there is all the same."""
        kv, size = self.core.scheduler.kv, self.core.scheduler.kv.block_size
        known = kv.admit("long", self.text[: context + 1])
        assert known >= size, "the first block is not in the cache"
        has_room = kv.reserve("long", context)
        assert has_room, "the cache has no room for the context"
        table = kv.block_table("long")
        places = range(known, context)
        self.core.runner.move_slots(
            [table[0] * size + place % size for place in places], [table[place // size] * size + place % size for place in places]
        )
        kv.commit("long", self.text, context)
        kv.carry_state("long", known)
        kv.free("long")
