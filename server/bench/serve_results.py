"""What `foretoken bench serve` makes of a run's times: percentiles, rates and goodput, under the names of `vllm bench serve`."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .load_client import Answer
from .serve_load import Run

METRICS = {"ttft": "Time to First Token", "tpot": "Time per Output Token", "itl": "Inter-token Latency", "e2el": "End-to-end Latency"}
GOALS = ("ttft", "tpot", "e2el")
TURNED_AWAY = (429, 503)
"""Too many requests of this client, and of all clients."""

Fields = dict[str, Any]


@dataclass(frozen=True)
class Report:
    """Which figures are wanted."""

    metrics: tuple[str, ...] = tuple(METRICS)
    percentiles: tuple[float, ...] = (50, 90, 99)
    goals: tuple[tuple[str, float], ...] = ()  # most milliseconds of a good request, by metric
    detailed: bool = False  # every request's times too

    def fields(self, run: Run) -> Fields:
        """All figures of a run. Those that no answer could give are left out."""
        answers, seconds = run.answers, run.seconds or math.inf
        tokens, prompt_tokens = sum(a.tokens for a in answers), sum(a.prompt_tokens for a in answers)
        chunks = sum(answer.chunks for answer in answers)
        limited = [failure for failure in run.failures if failure.status in TURNED_AWAY]
        found: Fields = {
            "duration": run.seconds,
            "completed": len(answers),
            "failed": len(run.failures) + run.not_sent,
            "total_input_tokens": prompt_tokens,
            "total_output_tokens": tokens,
            "request_throughput": len(answers) / seconds,
            "output_throughput": tokens / seconds,
            "total_token_throughput": (tokens + prompt_tokens) / seconds,
            "max_concurrent_requests": run.most_at_once,
            "not_sent": run.not_sent,
            "rate_limited": len(limited),
            "client_cpu_share": run.client_cpu_s / seconds,
        }
        if self.goals:
            found["request_goodput"] = sum(map(self._is_good, answers)) / seconds
        if waits := [failure.retry_after_s for failure in limited if failure.retry_after_s is not None]:
            found["max_retry_after_s"] = max(waits)
        if chunks:
            found["tokens_per_chunk"] = tokens / chunks
            found["client_us_per_chunk"] = run.client_cpu_s / chunks * 1e6
        for metric in self.metrics:
            found |= self._distribution(metric, times(metric, answers))
        return found | (_details(run) if self.detailed else {})

    def _distribution(self, metric: str, seconds: Sequence[float]) -> Fields:
        if not seconds:
            return {}
        ms = np.asarray(seconds) * 1e3
        found = {f"mean_{metric}_ms": float(ms.mean()), f"median_{metric}_ms": float(np.median(ms)), f"std_{metric}_ms": float(ms.std())}
        return found | {f"p{p:g}_{metric}_ms": float(np.percentile(ms, p)) for p in self.percentiles}

    def _is_good(self, answer: Answer) -> bool:
        return all(value * 1e3 <= most for metric, most in self.goals for value in times(metric, [answer]))


def times(metric: str, answers: Iterable[Answer]) -> list[float]:
    """Seconds: one a request, for itl one a gap between two pieces of text. Requests that have no such time give none."""
    found: list[float] = []
    for a in answers:
        if not a.arrivals:
            continue
        first, last = a.arrivals[0], a.arrivals[-1]
        match metric:
            case "ttft":
                found.append(first)
            case "tpot" if a.token_s is not None:
                found.append(a.token_s)
            case "itl":
                found.extend(_gaps(a))
            case "e2el":
                found.append(last)
    return found


def _gaps(answer: Answer) -> list[float]:
    return [after - before for before, after in zip(answer.arrivals, answer.arrivals[1:], strict=False)]


def _details(run: Run) -> Fields:
    """As vLLM's --save-detailed: a list for each figure, a failed request with zeros and its error."""
    empty = Answer(0.0, 0, 0, "")
    answers = [outcome.answer or empty for outcome in run.outcomes]
    return {
        "input_lens": [a.prompt_tokens for a in answers],
        "output_lens": [a.tokens for a in answers],
        "ttfts": [a.first_s or 0.0 for a in answers],
        "itls": [_gaps(a) for a in answers],
        "latencies": [a.last_s or 0.0 for a in answers],
        "start_times": [outcome.started_s for outcome in run.outcomes],
        "generated_texts": [a.text for a in answers],
        "errors": [str(outcome.failure or "") for outcome in run.outcomes],
    }


LINES = (
    ("Maximum request concurrency", "max_concurrency", "{}"),
    ("Request rate configured (RPS)", "request_rate", "{}"),
    ("Successful requests", "completed", "{}"),
    ("Failed requests", "failed", "{}"),
    ("Benchmark duration (s)", "duration", "{:.2f}"),
    ("Total input tokens", "total_input_tokens", "{}"),
    ("Total generated tokens", "total_output_tokens", "{}"),
    ("Request throughput (req/s)", "request_throughput", "{:.2f}"),
    ("Request goodput (req/s)", "request_goodput", "{:.2f}"),
    ("Output token throughput (tok/s)", "output_throughput", "{:.2f}"),
    ("Total token throughput (tok/s)", "total_token_throughput", "{:.2f}"),
    ("Peak concurrent requests", "max_concurrent_requests", "{}"),
    ("Tokens per chunk", "tokens_per_chunk", "{:.2f}"),
)
SPECULATION_LINES = (
    ("Acceptance rate (%)", "spec_decode_acceptance_rate", "{:.2f}"),
    ("Acceptance length", "spec_decode_acceptance_length", "{:.2f}"),
    ("Drafts", "spec_decode_num_drafts", "{}"),
    ("Draft tokens", "spec_decode_draft_tokens", "{}"),
    ("Accepted tokens", "spec_decode_accepted_tokens", "{}"),
)
LABEL_WIDTH, COLUMN_WIDTH = 34, 11


def table(runs: Sequence[Mapping[str, Any]], report: Report) -> str:
    """A column for each run; lines that no run has a figure for are left out."""
    sections: list[tuple[str, Sequence[tuple[str, str, str]]]] = [("Serving Benchmark Result", LINES)]
    for metric in report.metrics:
        wanted = [("Mean", "mean"), *(("Median" if p == 50 else f"P{p:g}", f"p{p:g}") for p in report.percentiles)]
        lines = [(f"{name} {metric.upper()} (ms)", f"{key}_{metric}_ms", "{:.2f}") for name, key in wanted]
        sections.append((METRICS[metric], lines))
    sections.append(("Speculative Decoding", SPECULATION_LINES))
    width = LABEL_WIDTH + COLUMN_WIDTH * len(runs)
    shown: list[str] = []
    for number, (title, lines) in enumerate(sections):
        rows = [_row(label, [_cell(run.get(key), pattern) for run in runs]) for label, key, pattern in lines if _known(runs, key)]
        if rows:
            shown += [f" {title} ".center(width, "-" if number else "="), *rows]
    return "\n".join([*shown, "=" * width])


def _known(runs: Sequence[Mapping[str, Any]], key: str) -> bool:
    return any(run.get(key) is not None for run in runs)


def _cell(value: object, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)


def _row(label: str, cells: Iterable[str]) -> str:
    return f"{label + ':':<{LABEL_WIDTH}}" + "".join(f"{cell:>{COLUMN_WIDTH}}" for cell in cells)


def failures(run: Run) -> list[str]:
    """What went wrong in a run, each kind once with its number, the most frequent first."""
    kinds = Counter(str(failure) for failure in run.failures).most_common()
    lines = [f"{count} failed: {message}" for message, count in kinds]
    return lines + ([f"{run.not_sent} were not sent after that"] if run.not_sent else [])
