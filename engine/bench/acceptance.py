"""Greedy answers with exact counts of what they took: target passes, drafts, guesses, and guesses that became text.

A pass that a row spends without a draft counts like any other, so that a proposer which seldom guesses is not flattered. Knows no
prompts' meaning and no files.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..boot import Engine
from ..request import SamplingParams
from .speculation_turn import Answer, take

OFF: Mapping[str, Any] = {"method": "off"}


@dataclass(frozen=True)
class Acceptance:
    """Sums over answers."""

    passes: int
    accepted: int  # guesses that became text
    drafts: int
    drafted: int

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Acceptance:
        passes, kept = sum(a.passes for a in answers), sum(a.kept for a in answers)
        return cls(passes, kept, sum(a.drafts for a in answers), sum(a.drafted for a in answers))

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


def answer(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int, speculation: Mapping[str, Any] = OFF) -> list[Answer]:
    """Greedy answers to all prompts together, in their order. speculation: as in a request; the engine must have the method.

    Raises ContextTooLong before anything runs, RequestFailed if an answer fails.
    """
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, speculation=dict(speculation))
    requests = [engine.intake.requests(str(number), prompt, params, time.monotonic())[0] for number, prompt in enumerate(prompts)]
    return list(take(engine.core, requests, len(requests)).answers)
