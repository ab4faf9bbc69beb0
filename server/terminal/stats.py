"""What an answer in the terminal cost and what speculation did for it, and the same of a whole conversation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .colors import Painter


@dataclass
class AnswerStats:
    """Sums of one answer or of several."""

    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0  # from being asked to the end
    drafted: int = 0
    accepted: int = 0
    by_proposer: Counter[str | None] = field(default_factory=Counter)  # None = the target; empty where the server does not tell

    @classmethod
    def of(cls, usage: dict[str, Any], metrics: dict[str, Any], by_proposer: Counter[str | None], seconds: float) -> AnswerStats:
        """seconds: as the client's clock says, for servers that tell no times. Interrupted answers come without usage."""
        tokens = int(usage.get("completion_tokens") or by_proposer.total())
        rate, speculation = metrics.get("tokens_per_second"), metrics.get("speculative_decoding") or {}
        drafted, accepted = speculation.get("num_draft_tokens") or 0, speculation.get("num_accepted_draft_tokens") or 0
        return cls(1, tokens, tokens / rate if rate else seconds, drafted, accepted, Counter(by_proposer))

    def add(self, other: AnswerStats) -> None:
        self.answers += other.answers
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.by_proposer += other.by_proposer

    @property
    def passes(self) -> int:
        """Of the target: each gave one token of its own."""
        return self.by_proposer[None]

    def describe(self, painter: Painter) -> str:
        """`20 tokens, 178 tokens/s; 2.33 a pass, 61% of guesses accepted; target 43%, draft_model 57%`, as far as known, or ""."""
        if not self.tokens:
            return ""
        parts = [f"{self.tokens:,} tokens, {self.tokens / max(self.seconds, 1e-9):,.0f} tokens/s"]
        if self.passes:
            speculation = f"{self.tokens / self.passes:.2f} a pass"
            parts.append(speculation + (f", {self.accepted / self.drafted:.0%} of guesses accepted" if self.drafted else ""))
        if len(self.by_proposer) > 1:
            parts.append(painter.legend(self.by_proposer))
        return "; ".join(parts)
