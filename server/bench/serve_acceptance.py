"""What a server's /metrics says about speculation, before and after a run: drafts, draft tokens and how many were accepted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from .load_client import LoadClient, ServerFailed

DRAFTS, DRAFT_TOKENS, ACCEPTED = (f"vllm:spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens"))
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
PREFIX = "vllm:spec_decode_num_"


@dataclass(frozen=True)
class Speculation:
    """Counters since the server's start, summed over its engines and models."""

    num_drafts: float = 0
    num_draft_tokens: float = 0
    num_accepted_tokens: float = 0
    accepted_at: dict[int, float] = field(default_factory=dict)  # by position in the draft

    def since(self, before: Speculation) -> Speculation:
        return Speculation(
            self.num_drafts - before.num_drafts,
            self.num_draft_tokens - before.num_draft_tokens,
            self.num_accepted_tokens - before.num_accepted_tokens,
            {position: count - before.accepted_at.get(position, 0) for position, count in self.accepted_at.items()},
        )

    def fields(self) -> dict[str, Any]:
        """By the names of `vllm bench serve`: the rate in percent, the length with the bonus token. Empty where nothing was drafted."""
        if self.num_drafts <= 0 or self.num_draft_tokens <= 0:
            return {}
        return {
            "spec_decode_acceptance_rate": 100 * self.num_accepted_tokens / self.num_draft_tokens,
            "spec_decode_acceptance_length": 1 + self.num_accepted_tokens / self.num_drafts,
            "spec_decode_num_drafts": int(self.num_drafts),
            "spec_decode_draft_tokens": int(self.num_draft_tokens),
            "spec_decode_accepted_tokens": int(self.num_accepted_tokens),
            "spec_decode_per_position_acceptance_rates": [self.accepted_at[at] / self.num_drafts for at in sorted(self.accepted_at)],
        }


async def read(client: LoadClient) -> Speculation | None:
    """None where the server has no such page, or does not speak of speculation there."""
    try:
        return parse(await client.page("/metrics"))
    except (ServerFailed, ValueError):
        return None


def parse(page: str) -> Speculation | None:
    """Of a page in Prometheus' text format. Raises ValueError for anything else."""
    totals = dict.fromkeys((DRAFTS, DRAFT_TOKENS, ACCEPTED), 0.0)
    accepted_at: dict[int, float] = {}
    found = False
    lines = (line for line in page.splitlines() if PREFIX in line)  # histograms of the rest would take longer than all of this
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            if sample.name in totals:
                totals[sample.name] += sample.value
                found = True
            elif sample.name == ACCEPTED_AT and sample.labels.get("position", "").isdecimal():
                at = int(sample.labels["position"])
                accepted_at[at] = accepted_at.get(at, 0.0) + sample.value
    return Speculation(totals[DRAFTS], totals[DRAFT_TOKENS], totals[ACCEPTED], accepted_at) if found else None
