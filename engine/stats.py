"""What the engine counts, as one snapshot. The server renders it for Prometheus and the log line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..proposers.proposer_set import ProposerHealth


@dataclass(frozen=True)
class ProposerStats:
    """Totals of one proposer since the start."""

    name: str
    num_drafts: int = 0  # drafts verified (row and step)
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    verify_seconds: float = 0.0  # of target steps, by this proposer's share of their tokens
    num_failures: int = 0
    draft_seconds: float = 0.0
    off_reason: str | None = None  # why it was switched off for good

    @property
    def num_wasted_tokens(self) -> int:
        """Guesses that were verified and not kept."""
        return self.num_draft_tokens - self.num_accepted_tokens


@dataclass(frozen=True)
class EngineStats:
    """Totals since the start, and gauges of the moment. Immutable: safe to hand to another thread."""

    num_running: int = 0
    num_waiting: int = 0
    running_adapters: tuple[str, ...] = ()  # names of adapters that running requests have, ...
    waiting_adapters: tuple[str, ...] = ()  # ... and waiting ones
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # of them, found
    # speculation, all proposers together
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    recent_draft_tokens: int = 0  # last 60 s
    recent_accepted_tokens: int = 0
    num_speculative_tokens: int = 0  # most guesses of a row that configuration and batch size allowed in the latest step, predictions aside
    mean_draft_ceiling: float = 0.0  # guesses asked for in the latest step, a row that could have some
    estimated_speedup: float | None = None  # against no speculation, recently; None = unknown
    speculation_off: str | None = None  # why the latest step did not speculate; None = it could
    acceptance: str = "match"  # the rule by which guesses are accepted
    is_lossy: bool = False  # whether that rule changes what is said
    steps_with_speculation_off: dict[str, int] = field(default_factory=dict)  # reason -> steps
    proposers: tuple[ProposerStats, ...] = ()
    step_seconds: float = 0.0
    target_seconds: float = 0.0  # in forward passes of the target

    def with_health(self, health: Mapping[str, ProposerHealth]) -> EngineStats:
        """The same snapshot with each proposer's failures and time."""
        return replace(
            self,
            proposers=tuple(
                replace(
                    p,
                    num_failures=health[p.name].num_failures,
                    draft_seconds=health[p.name].draft_seconds,
                    off_reason=health[p.name].off_reason,
                )
                for p in self.proposers
            ),
        )
