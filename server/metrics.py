"""What Prometheus and the log are told of requests: times, tokens, endings, and how well guesses went in each.

Names and the labels model_name and engine are vLLM's, so that its dashboards work; `foretoken:` names what it lacks.
Label values come from closed sets, and adapters have names. The engine's own counts are never counted twice: engine_metrics.py renders
its snapshot.
"""

import asyncio
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import Scope

from ..engine.engine_metrics import ENGINE, LABELS, EngineCollector, share
from ..engine.request import FinishReason, SpeculationStats
from ..engine.stats import EngineStats

logger = logging.getLogger("foretoken.server")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LOG_INTERVAL_S = 10.0
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10, 20, 40, 80,
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_ACCEPTED = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9, 12, 17, 33, 65)  # 1 = every guess was rejected, 65 = each draft of 64 was right


class Metrics:
    """A registry of its own: several apps may live in one process."""

    def __init__(
        self, stats: Callable[[], EngineStats], model_name: str, proposer_names: Sequence[str], max_loras: int | None = None
    ) -> None:
        self.registry = CollectorRegistry()
        self._stats = stats
        labels = (model_name, ENGINE)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, LABELS, registry=self.registry, buckets=buckets).labels(*labels)

        self._ttft = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self._queue = histogram("vllm:request_queue_time_seconds", "From the queue to the first step, of a finished choice.", _SECONDS)
        itl = TokenLatency(labels)
        self.registry.register(itl)
        self.on_tokens = itl.add
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.", _SECONDS)
        self._prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens of a finished choice.", _TOKENS)
        self._generated = histogram("vllm:request_generation_tokens", "Generated tokens of a finished choice.", _TOKENS)
        success = Counter("vllm:request_success", "Ended choices by reason.", (*LABELS, "finished_reason"), registry=self.registry)
        reasons: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")
        self._success = {reason: success.labels(*labels, reason) for reason in reasons}
        text = "Tokens per target pass with a draft of this proposer, the target's own one included, of a finished choice."
        name = "foretoken:request_mean_accepted_length"
        lengths = Histogram(name, text, (*LABELS, "proposer"), registry=self.registry, buckets=_ACCEPTED)
        self._accepted = [lengths.labels(*labels, proposer) for proposer in proposer_names]
        self._http = Counter("foretoken:http_requests", "Answers by route and status.", ("route", "status"), registry=self.registry)
        self._unknown_fields = Counter(
            "foretoken:unknown_request_fields", "Request fields that were ignored because nobody knows them.", registry=self.registry
        )
        self.registry.register(EngineCollector(stats, labels, max_loras))

    def on_first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def on_queued(self, seconds: float) -> None:
        self._queue.observe(seconds)

    def on_finish(self, reason: FinishReason, seconds: float, num_prompt_tokens: int, num_tokens: int) -> None:
        self._success[reason].inc()
        self._e2e.observe(seconds)
        self._prompt.observe(num_prompt_tokens)
        self._generated.observe(num_tokens)

    def on_speculation(self, stats: SpeculationStats) -> None:
        """What came of the guesses for one finished choice: an observation for each proposer that guessed."""
        for proposer, (num_drafts, num_accepted) in stats.of_proposer.items():
            self._accepted[proposer].observe(1 + num_accepted / num_drafts)

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
            f"mean accepted length {1 + accepted / drafts:.1f}, k {drafted / drafts:.1f}"
        )
    else:
        speculation = f"Speculative decoding: {now.speculation_off or 'no drafts'}"
    generated = (now.generation_tokens - before.generation_tokens) / seconds
    prompted = (now.prompt_tokens - before.prompt_tokens) / seconds
    return (
        f"{speculation}; running {now.num_running}, waiting {now.num_waiting}, generated {generated:.1f} tokens/s, "
        f"prompts {prompted:.1f} tokens/s, KV cache {share(now.kv_blocks_used, now.kv_blocks_total):.1%}"
    )


class TokenLatency(Collector):
    """The one histogram that every token passes. Only the event loop writes it, so it does without prometheus_client's locks."""

    def __init__(self, labels: tuple[str, str]) -> None:
        self._labels = labels
        self._counts = [0] * (len(_TOKEN_SECONDS) + 1)  # by bucket, not cumulated; the last one has no bound
        self._seconds = 0.0

    def add(self, gap_s: float, num_tokens: int) -> None:
        """A step brought several tokens at once: each counts with its share, so that the histogram's mean is true."""
        self._counts[bisect_left(_TOKEN_SECONDS, gap_s / num_tokens)] += num_tokens
        self._seconds += gap_s

    def collect(self) -> Iterable[Metric]:
        text = "Gap between steps divided by the tokens of the step, per token."
        family = HistogramMetricFamily("vllm:inter_token_latency_seconds", text, labels=LABELS)
        bounds = [*(str(float(bound)) for bound in _TOKEN_SECONDS), "+Inf"]
        family.add_metric(self._labels, list(zip(bounds, accumulate(self._counts), strict=True)), self._seconds)
        return [family]
