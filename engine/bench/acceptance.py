"""Greedy answers with exact counts of what they took: target passes, drafts, guesses, and guesses that became text.

A pass that a row spends without a draft counts like any other, so that a proposer which seldom guesses is not flattered. Knows no
prompts' meaning and no files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..boot import Engine
from ..errors import RequestFailed
from ..request import SamplingParams

OFF: Mapping[str, Any] = {"method": "off"}


@dataclass
class CountedAnswer:
    """One answer, and the steps of the engine that made it."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    passes: int = 0                  # of the target that gave tokens; the one that ends the prompt may have a draft, too
    accepted: int = 0                # guesses that became tokens of the answer
    drafts: int = 0                  # passes with a draft
    drafted: int = 0                 # guesses
    finish_reason: str = ""


@dataclass(frozen=True)
class Acceptance:
    """Sums over answers."""

    passes: int
    accepted: int
    drafts: int
    drafted: int

    @classmethod
    def of(cls, answers: Iterable[CountedAnswer]) -> Acceptance:
        found = list(answers)
        return cls(*(sum(getattr(answer, name) for answer in found) for name in ("passes", "accepted", "drafts", "drafted")))

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(
            self.passes + other.passes, self.accepted + other.accepted, self.drafts + other.drafts, self.drafted + other.drafted)

    @property
    def mu(self) -> float:
        """Accepted guesses per target pass; the mean accepted length is one more."""
        return self.accepted / max(1, self.passes)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens committed per target pass, the target's own included."""
        return 1.0 + self.mu

    @property
    def length_with_draft(self) -> float:
        """The same over passes with a draft alone, as servers report it. Every other pass commits one token."""
        return 1.0 + self.accepted / max(1, self.drafts)

    @property
    def rate(self) -> float:
        """Share of the guesses that were accepted."""
        return self.accepted / max(1, self.drafted)


def answer(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    speculation: Mapping[str, Any] = OFF,
    on_finish: Callable[[], object] = lambda: None,
) -> list[CountedAnswer]:
    """Greedy answers to all prompts together, in their order. speculation: as in a request; the engine must have the method.

    Raises ContextTooLong before anything runs, RequestFailed if an answer fails.
    """
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, speculation=dict(speculation))
    answers = {str(number): CountedAnswer() for number in range(len(prompts))}
    requests = [engine.intake.requests(str(number), prompt, params, time.monotonic())[0] for number, prompt in enumerate(prompts)]
    for request in requests:
        engine.core.add_request(request)
    while engine.core.has_work:
        for delta in engine.core.step(time.monotonic()):
            found = answers[delta.request_id]
            if delta.token_ids:
                found.passes += 1
                found.accepted += sum(source >= 0 for source in delta.sources)
            found.token_ids.extend(delta.token_ids)
            found.text += delta.text
            if delta.finish_reason is None:
                continue
            if delta.error is not None:
                raise RequestFailed(f"prompt {delta.request_id}: {delta.error}", delta.error_code or "engine_error")
            found.finish_reason = delta.finish_reason
            if delta.stats is not None:
                found.drafts, found.drafted = delta.stats.num_steps, delta.stats.num_draft_tokens
            on_finish()
    return list(answers.values())
