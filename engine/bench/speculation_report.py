"""Figures of speculation as tables for the terminal and for Markdown, and the lines that people look for."""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from .interleaved import Spread
from .speculation_figures import Figures
from .table import Table


def tables(found: Sequence[Figures], per_request: Figures | None = None) -> list[Table]:
    """Speed and economics for every number of requests, acceptance by position, and on request one setting's requests."""
    together = list(dict.fromkeys(f.concurrency for f in found))
    parts = [table for n in together for mine in [[f for f in found if f.concurrency == n]] for table in (_speed(mine), _economics(mine))]
    return [*parts, _positions([f for f in found if f.concurrency == together[0]]), *([_requests(per_request)] if per_request else [])]


def closing(best: Figures, advice: str, entries: Sequence[Mapping[str, Any]]) -> str:
    """The result in four lines, the advice, and what to paste."""
    return "\n".join([
        f"{best.setting.label}, {_at_a_time(best.concurrency)}",
        f"  Baseline:         {best.baseline.median:,.1f} tokens/s",
        f"  Speculative:      {best.speculative.median:,.1f} tokens/s",
        f"  Speedup:          {_times(best.speedup.median)} ({_spread(best.speedup)})",
        f"  Acceptance rate:  {_percent(best.acceptance_rate)}",
        "",
        advice,
        paste(entries),
    ])


def paste(entries: Sequence[Mapping[str, Any]]) -> str:
    """The flag for `foretoken serve`, quoted for a shell."""
    value = entries[0] if len(entries) == 1 else list(entries)
    return f"--speculative-config {shlex.quote(json.dumps(value))}"


def _speed(found: Sequence[Figures]) -> Table:
    header = [
        "", "Baseline", "Speculative", "Speedup", "middle half", "Acceptance rate", "mu", "mean accepted length", "guesses a pass",
        "same answers",
    ]
    rows = [
        [
            f.setting.label, f"{f.baseline.median:,.1f}", f"{f.speculative.median:,.1f}", _times(f.speedup.median), _spread(f.speedup),
            _percent(f.acceptance_rate), f"{f.mu:.2f}", f"{f.mean_accepted_length:.2f}", f"{f.guesses:.2f}", f"{f.same_answers:.0%}",
        ]
        for f in found
    ]
    about = (
        f"Tokens a second of all requests together. Without speculation decoding takes {found[0].decode_share:.0%} of a request's time, "
        "its prompt the rest."
    )
    return Table(f"Speed, {_at_a_time(found[0].concurrency)}", about, header, rows)


def _economics(found: Sequence[Figures]) -> Table:
    header = [
        "", "draft_cost_ratio", "verify cost", "published", "predicted", "measured", "tokens a pass", "drafting", "verification",
        "bookkeeping", "prompts, batch",
    ]
    rows = [
        [
            f.setting.label, f"{f.draft_cost_ratio:.3f}", f"{f.verify_cost_ratio:.3f}", _times(f.published), _times(f.predicted),
            _times(f.speedup.median), f"{f.mean_accepted_length:.2f}", *(
                f"x {factor:.2f}" for factor in (f.drafting_factor, f.verification_factor, f.bookkeeping_factor, f.rest_factor)
            ),
        ]
        for f in found
    ]
    about = (
        "Costs of a pass's drafting and verifying, 1 = the target's pass without speculation. published: (1 + mu) / ((1 + mu) c + 1), "
        "where one guess costs c and verifying nothing; predicted: (1 + mu) / (draft + verify cost). Tokens a pass times the four factors "
        "is the measured speed-up: what drafting, verifying more than a token, bookkeeping, and prompts with emptying batches leave of it."
    )
    return Table(f"Where the gain goes, {_at_a_time(found[0].concurrency)}", about, header, rows)


def _positions(found: Sequence[Figures]) -> Table:
    longest = max((len(f.acceptance_per_position) for f in found), default=0)
    rows = [
        [f.setting.label, *(f"{share:.0%}" for share in f.acceptance_per_position), *[""] * (longest - len(f.acceptance_per_position))]
        for f in found if f.acceptance_per_position
    ]
    about = "Share of the drafts of which at least so many guesses were accepted."
    return Table("Acceptance per position", about, ["", *(str(i + 1) for i in range(longest))], rows)


def _requests(figures: Figures) -> Table:
    header = ["", "tokens", "Baseline, ms", "Speculative, ms", "Speedup", "Acceptance rate", "mean accepted length", "decode share"]
    rows = [
        [
            f"prompt {i}", str(r.tokens), f"{r.baseline_s * 1e3:,.0f}", f"{r.speculative_s * 1e3:,.0f}", _times(r.speedup),
            _percent(r.acceptance_rate), f"{r.mean_accepted_length:.2f}", f"{r.decode_share:.0%}",
        ]
        for i, r in enumerate(figures.requests, 1)
    ]
    return Table(f"Requests of the last round, {figures.setting.label}, {_at_a_time(figures.concurrency)}", "", header, rows)


def _at_a_time(concurrency: int) -> str:
    return "one request at a time" if concurrency == 1 else f"{concurrency} requests at a time"


def _times(value: float) -> str:
    return f"{value:.2f}x"


def _spread(value: Spread) -> str:
    return f"{value.low:.2f}-{value.high:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.1f} %"
