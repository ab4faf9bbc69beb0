"""What Prometheus and the log are told. The engine's own counts are read from its snapshot, never counted twice.

Names and the labels model_name and engine are vLLM's, so that its dashboards work; `foretoken:` names what it lacks.
Label values come from closed sets.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import Scope

from ..engine.request import FinishReason
from ..engine.stats import EngineStats

logger = logging.getLogger("foretoken.server")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LOG_INTERVAL_S = 10.0
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_LABELS = ("model_name", "engine")
_INFO_LABELS = (*_LABELS, "rule", "lossy")
ENGINE = "0"  # one process is one replica


class Metrics:
    """A registry of its own: several apps may live in one process."""

    def __init__(self, stats: Callable[[], EngineStats], model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._stats = stats
        labels = (model_name, ENGINE)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, _LABELS, registry=self.registry, buckets=buckets).labels(*labels)

        self._ttft = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self._queue = histogram("vllm:request_queue_time_seconds", "From arrival to the first step, of a finished choice.", _SECONDS)
        self._itl = TokenLatency(labels)
        self.registry.register(self._itl)
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.", _SECONDS)
        self._prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens of a finished choice.", _TOKENS)
        self._generated = histogram("vllm:request_generation_tokens", "Generated tokens of a finished choice.", _TOKENS)
        success = Counter("vllm:request_success", "Ended choices by reason.", (*_LABELS, "finished_reason"), registry=self.registry)
        reasons: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")
        self._success = {reason: success.labels(*labels, reason) for reason in reasons}
        self._http = Counter("foretoken:http_requests", "Answers by route and status.", ("route", "status"), registry=self.registry)
        self._unknown_fields = Counter(
            "foretoken:unknown_request_fields", "Request fields that were ignored because nobody knows them.", registry=self.registry
        )
        self.registry.register(EngineCollector(stats, labels))

    def on_first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def on_queued(self, seconds: float) -> None:
        self._queue.observe(seconds)

    def on_tokens(self, gap_s: float, num_tokens: int) -> None:
        """A step brought several tokens at once: each counts with its share, so that the histogram's mean is true."""
        self._itl.add(gap_s / num_tokens, num_tokens)

    def on_finish(self, reason: FinishReason, seconds: float, num_prompt_tokens: int, num_tokens: int) -> None:
        self._success[reason].inc()
        self._e2e.observe(seconds)
        self._prompt.observe(num_prompt_tokens)
        self._generated.observe(num_tokens)

    def on_response(self, scope: Scope, status: int) -> None:
        route = scope.get("route")
        self._http.labels(route.path if route is not None else "other", str(status)).inc()

    def on_unknown_fields(self, num: int) -> None:
        self._unknown_fields.inc(num)

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)

    async def log_traffic(self) -> None:
        """Every 10 s with traffic: one line. Runs until cancelled."""
        before, at = self._stats(), time.monotonic()
        while True:
            await asyncio.sleep(LOG_INTERVAL_S)
            now, later = self._stats(), time.monotonic()
            if now.num_steps != before.num_steps:
                logger.info("%s", traffic_line(before, now, later - at))
            before, at = now, later


def traffic_line(before: EngineStats, now: EngineStats, seconds: float) -> str:
    """What happened between two snapshots: speculation first, then load."""
    drafts = now.num_drafts - before.num_drafts
    drafted = now.num_draft_tokens - before.num_draft_tokens
    accepted = now.num_accepted_tokens - before.num_accepted_tokens
    if drafted:
        speculation = (
            f"Speculative decoding acceptance rate: {accepted / drafted:.1%}, "
            f"mean accepted length {1 + accepted / drafts:.1f}, k {now.num_speculative_tokens}"
        )
    else:
        speculation = f"Speculative decoding: {now.speculation_off or 'no drafts'}"
    generated = (now.generation_tokens - before.generation_tokens) / seconds
    prompted = (now.prompt_tokens - before.prompt_tokens) / seconds
    return (
        f"{speculation}; running {now.num_running}, waiting {now.num_waiting}, generated {generated:.1f} tokens/s, "
        f"prompts {prompted:.1f} tokens/s, KV cache {_share(now.kv_blocks_used, now.kv_blocks_total):.1%}"
    )


class TokenLatency(Collector):
    """The one histogram that every token passes. Only the event loop writes it, so it does without prometheus_client's locks."""

    def __init__(self, labels: tuple[str, str]) -> None:
        self._labels = labels
        self._counts = [0] * (len(_TOKEN_SECONDS) + 1)  # by bucket, not cumulated; the last one has no bound
        self._seconds = 0.0

    def add(self, seconds: float, num_tokens: int) -> None:
        self._counts[bisect_left(_TOKEN_SECONDS, seconds)] += num_tokens
        self._seconds += seconds * num_tokens

    def collect(self) -> Iterable[Metric]:
        text = "Gap between steps divided by the tokens of the step, per token."
        family = HistogramMetricFamily("vllm:inter_token_latency_seconds", text, labels=_LABELS)
        bounds = [*(str(float(bound)) for bound in _TOKEN_SECONDS), "+Inf"]
        family.add_metric(self._labels, list(zip(bounds, accumulate(self._counts), strict=True)), self._seconds)
        return [family]


class EngineCollector(Collector):
    """Renders an EngineStats snapshot, taken when Prometheus asks."""

    def __init__(self, stats: Callable[[], EngineStats], labels: tuple[str, str]) -> None:
        self._stats = stats
        self._labels = labels

    def describe(self) -> Iterable[Metric]:
        return ()  # the names are known only with a snapshot; the registry is ours, nothing can collide

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        yield from self._load(stats)
        yield from self._speculation(stats)
        yield from self._proposers(stats)

    def _load(self, s: EngineStats) -> Iterable[Metric]:
        yield self._gauge("vllm:num_requests_running", "Requests in the running batch.", s.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests in the queue.", s.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "KV blocks in use, 0 to 1.", _share(s.kv_blocks_used, s.kv_blocks_total))
        yield self._counter("vllm:prompt_tokens", "Prompt tokens taken in.", s.prompt_tokens)
        yield self._counter("vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache.", s.cached_prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens generated.", s.generation_tokens)
        yield self._counter("vllm:num_preemptions", "Requests put back into the queue for want of blocks.", s.num_preemptions)
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", s.prefix_cache_queries)
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found there.", s.prefix_cache_hits)
        yield self._counter("foretoken:steps", "Engine steps.", s.num_steps)
        yield self._counter("foretoken:step_seconds", "Time in engine steps.", s.step_seconds)
        yield self._counter("foretoken:target_seconds", "Time in forward passes of the target.", s.target_seconds)

    def _speculation(self, s: EngineStats) -> Iterable[Metric]:
        yield self._counter("vllm:spec_decode_num_drafts", "Drafts verified.", s.num_drafts)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.", s.num_draft_tokens)
        yield self._counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.", s.num_accepted_tokens)
        accepted = [(str(position), count) for position, count in enumerate(s.accepted_per_position)]
        yield self._counters("vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted by depth in the draft.", "position", accepted)
        rate = _share(s.recent_accepted_tokens, s.recent_draft_tokens)
        yield self._gauge("vllm:spec_decode_acceptance_rate", "Accepted / drafted, last 60 s.", rate)
        yield self._gauge("foretoken:num_speculative_tokens", "Draft tokens per row in the latest step.", s.num_speculative_tokens)
        rule = GaugeMetricFamily("foretoken:acceptance_info", "The rule that accepts drafts, and whether it is lossy.", labels=_INFO_LABELS)
        rule.add_metric((*self._labels, s.acceptance, str(s.is_lossy).lower()), 1)
        yield rule
        off = list(s.steps_with_speculation_off.items())
        yield self._counters("foretoken:spec_decode_disabled", "Steps that did not speculate, by reason.", "reason", off)

    def _proposers(self, s: EngineStats) -> Iterable[Metric]:
        def each(name: str, text: str, count: Callable[..., float]) -> Metric:
            return self._counters(f"foretoken:proposer_{name}", text, "proposer", [(p.name, count(p)) for p in s.proposers])

        yield each("drafts", "Drafts of this proposer verified.", lambda p: p.num_drafts)
        yield each("draft_tokens", "Draft tokens of this proposer verified.", lambda p: p.num_draft_tokens)
        yield each("accepted_tokens", "Draft tokens of this proposer accepted.", lambda p: p.num_accepted_tokens)
        yield each("failures", "Steps in which this proposer failed.", lambda p: p.num_failures)
        yield each("seconds", "Time spent drafting.", lambda p: p.draft_seconds)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counters(self, name: str, text: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
        family = CounterMetricFamily(name, text, labels=(*_LABELS, label))
        for of, value in values:
            family.add_metric((*self._labels, of), value)
        return family


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
