"""One turn of a speculation benchmark: prompts through one core, so many at a time, and where each second of it went.

Steps in which every row decodes are told from those that read a prompt: speculation speeds up the first kind alone. Knows no method.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import RequestFailed
from ..request import Request, TokenDelta

if TYPE_CHECKING:
    from ..core import EngineCore


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the engine. Seconds."""

    decodes: bool  # nobody reads a prompt in it
    passes: int  # of the target, counted for each row that got tokens from one
    rounds: int  # passes for all rows together
    tokens: int
    drafted: int
    accepted: int
    seconds: float
    target_s: float  # in the target's forward pass
    draft_s: float  # of all proposers, their listening included

    @property
    def bookkeeping_s(self) -> float:
        """The rest: scheduling, sampling, matching, text."""
        return self.seconds - self.target_s - self.draft_s

    def describe(self) -> str:
        guessed = f"accepted {self.accepted}/{self.drafted}" if self.drafted else "nothing guessed"
        kind = "" if self.decodes else " (prompt)"
        rounds = f" in {self.rounds} passes" if self.rounds > 1 else ""
        return f"Draft: {self.draft_s * 1e3:.1f} ms, verify: {self.target_s * 1e3:.1f} ms{rounds}, {guessed}{kind}"


@dataclass
class Answer:
    """One request of a turn."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    passes: int = 0  # of the target that gave it tokens; the one that ends the prompt may have a draft, too
    drafts: int = 0  # passes with a draft
    drafted: int = 0  # guesses
    accepted: int = 0
    kept: int = 0  # accepted guesses that became tokens of the answer: those behind its end did not
    histogram: list[int] = field(default_factory=list)  # [j]: drafts of which j guesses were accepted
    first_s: float = 0.0  # from being asked to the first token
    seconds: float = 0.0  # and to the last

    @property
    def decode_s(self) -> float:
        return self.seconds - self.first_s


@dataclass(frozen=True)
class Turn:
    """All prompts answered once."""

    seconds: float
    steps: tuple[Step, ...]
    answers: tuple[Answer, ...]  # in the order of the requests

    @property
    def tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def decoding(self) -> tuple[Step, ...]:
        """Steps in which everybody decodes; all of them if there is none."""
        return tuple(step for step in self.steps if step.decodes) or self.steps

    @property
    def decode_share(self) -> float:
        """Of the requests' time, the part behind the first token."""
        return sum(answer.decode_s for answer in self.answers) / max(sum(answer.seconds for answer in self.answers), 1e-9)


def take(
    core: EngineCore,
    requests: Sequence[Request],
    concurrency: int,
    on_step: Callable[[Step], None] = lambda step: None,
    on_deltas: Callable[[Sequence[TokenDelta]], None] = lambda deltas: None,
) -> Turn:
    """Answer all requests; whoever ends makes room for the next one. on_deltas: what a step gave, before on_step.

    Raises RequestFailed if one of them cannot be answered.
    """
    waiting, found, begun = deque(requests), {request.request_id: Answer() for request in requests}, dict[str, float]()
    unread: set[str] = set()  # running, without a token yet
    steps: list[Step] = []
    running = 0
    started = time.perf_counter()
    while waiting or running:
        while waiting and running < concurrency:
            request = waiting.popleft()
            core.add_request(request)
            begun[request.request_id] = time.perf_counter()
            unread.add(request.request_id)
            running += 1
        decodes = not unread
        before = _counters(core)
        deltas = core.step(time.monotonic())
        now = time.perf_counter()
        spent = [after - then for after, then in zip(_counters(core), before, strict=True)]
        grown = [delta for delta in deltas if delta.token_ids]
        tokens = sum(len(delta.token_ids) for delta in grown)
        passes = sum(delta.num_passes for delta in grown)
        steps.append(Step(decodes, passes, int(spent[5]), tokens, int(spent[3]), int(spent[4]), *spent[:3]))
        on_deltas(deltas)
        on_step(steps[-1])
        for delta in deltas:
            _add(found[delta.request_id], delta, now - begun[delta.request_id])
            if delta.token_ids:
                unread.discard(delta.request_id)
            running -= delta.finish_reason is not None
    return Turn(time.perf_counter() - started, tuple(steps), tuple(found.values()))


def _counters(core: EngineCore) -> tuple[float, ...]:
    counts = core.controller.counts
    drafting = sum(core.proposers.draft_seconds)
    sums = counts.sums
    return core.step_seconds, core.target_seconds, drafting, sums.draft_tokens, sums.accepted_tokens, core.num_steps


def _add(answer: Answer, delta: TokenDelta, seconds: float) -> None:
    if delta.error is not None:
        raise RequestFailed(f"prompt {delta.request_id}: {delta.error}", delta.error_code or "engine_error")
    if delta.token_ids:
        answer.first_s = answer.first_s or seconds
        answer.seconds = seconds
        answer.passes += delta.num_passes
        answer.kept += sum(source >= 0 for source in delta.sources)
        answer.token_ids.extend(delta.token_ids)
    answer.text += delta.text
    answer.finish_reason = delta.finish_reason or ""
    if delta.stats is not None:
        stats = delta.stats
        answer.drafts, answer.drafted, answer.accepted = stats.num_steps, stats.num_draft_tokens, stats.num_accepted_tokens
        answer.histogram = list(stats.histogram)
