"""The engine's snapshot for Prometheus: load, and what speculation costs and brings, by proposer.

Rendered when Prometheus asks, from one EngineStats; nothing is counted here. Label values come from closed sets:
the configured proposers, the reasons not to speculate, depths in a draft; and there are the names of the adapters in use.
"""

import time
from collections.abc import Callable, Iterable

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .policy.base import BATCH_SIZE, NO_PROPOSER, SLOWER
from .stats import EngineStats, ProposerStats

LABELS = ("model_name", "engine")
ENGINE = "0"  # one process is one replica
OFF_REASONS = (NO_PROPOSER, BATCH_SIZE, SLOWER)


class EngineCollector(Collector):
    """Renders what `stats` returns. labels: values of LABELS. max_loras: None = no adapters are served."""

    def __init__(self, stats: Callable[[], EngineStats], labels: tuple[str, str], max_loras: int | None = None) -> None:
        self._stats = stats
        self._labels = labels
        self._max_loras = max_loras

    def describe(self) -> Iterable[Metric]:
        return ()  # the names are known only with a snapshot; the registry is ours, nothing can collide

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        yield from self._load(stats)
        if self._max_loras is not None:
            yield self._adapters(stats, self._max_loras)
        yield from self._speculation(stats)
        yield from self._decision(stats)
        yield from self._proposers(stats.proposers)

    def _load(self, s: EngineStats) -> Iterable[Metric]:
        yield self._gauge("vllm:num_requests_running", "Requests in the running batch.", s.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests in the queue.", s.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "KV blocks in use, 0 to 1.", share(s.kv_blocks_used, s.kv_blocks_total))
        yield self._counter("vllm:prompt_tokens", "Prompt tokens taken in.", s.prompt_tokens)
        yield self._counter("vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache.", s.cached_prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens generated.", s.generation_tokens)
        yield self._counter("vllm:num_preemptions", "Requests put back into the queue for want of blocks.", s.num_preemptions)
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", s.prefix_cache_queries)
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found there.", s.prefix_cache_hits)
        yield self._counter("foretoken:steps", "Engine steps.", s.num_steps)
        yield self._counter("foretoken:step_seconds", "Time in engine steps.", s.step_seconds)
        yield self._counter("foretoken:target_seconds", "Time in forward passes of the target.", s.target_seconds)

    def _adapters(self, s: EngineStats, max_loras: int) -> Metric:
        """Its value is the time, as vLLM has it: whoever reads it takes the latest."""
        labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        family = self._gauges("vllm:lora_requests_info", "Adapters that requests have now; the value is the time.", labels)
        names = (",".join(s.running_adapters), ",".join(s.waiting_adapters))
        family.add_metric((*self._labels, str(max_loras), *names), time.time())
        return family

    def _speculation(self, s: EngineStats) -> Iterable[Metric]:
        yield self._counter("vllm:spec_decode_num_drafts", "Drafts verified.", s.num_drafts)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.", s.num_draft_tokens)
        yield self._counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.", s.num_accepted_tokens)
        accepted = [(str(position), count) for position, count in enumerate(s.accepted_per_position)]
        yield self._counters("vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted by depth in the draft.", "position", accepted)
        rate = share(s.recent_accepted_tokens, s.recent_draft_tokens)
        yield self._gauge("vllm:spec_decode_acceptance_rate", "Accepted / drafted, last 60 s.", rate)
        rule = self._gauges("foretoken:acceptance_info", "The rule that accepts drafts, and whether it is lossy.", ("rule", "lossy"))
        rule.add_metric((*self._labels, s.acceptance, str(s.is_lossy).lower()), 1)
        yield rule

    def _decision(self, s: EngineStats) -> Iterable[Metric]:
        text = "Most draft tokens per row that configuration and batch size allowed in the latest step."
        yield self._gauge("foretoken:num_speculative_tokens", text, s.num_speculative_tokens)
        text = "Draft tokens asked for in the latest step, mean over the rows that could have some."
        yield self._gauge("foretoken:mean_draft_ceiling", text, s.mean_draft_ceiling)
        yield self._gauge("foretoken:speculation_on", "Whether the latest step could speculate.", s.speculation_off is None)
        why = self._gauges("foretoken:speculation_off_reason", "1 for the reason why the latest step did not speculate.", ("reason",))
        for reason in OFF_REASONS:
            why.add_metric((*self._labels, reason), s.speculation_off == reason)
        yield why
        off = [(reason, s.steps_with_speculation_off.get(reason, 0)) for reason in OFF_REASONS]
        yield self._counters("foretoken:spec_decode_disabled", "Steps that did not speculate, by reason.", "reason", off)
        if s.estimated_speedup is not None:  # a number where none is known would be taken for one
            text = "Estimated tokens per second with speculation over those without it, recent steps."
            yield self._gauge("foretoken:estimated_speedup", text, s.estimated_speedup)

    def _proposers(self, proposers: Iterable[ProposerStats]) -> Iterable[Metric]:
        proposers = tuple(proposers)

        def each(name: str, text: str, count: Callable[[ProposerStats], float]) -> Metric:
            return self._counters(f"foretoken:proposer_{name}", text, "proposer", [(p.name, count(p)) for p in proposers])

        yield each("drafts", "Drafts of this proposer verified.", lambda p: p.num_drafts)
        yield each("draft_tokens", "Draft tokens of this proposer verified.", lambda p: p.num_draft_tokens)
        yield each("accepted_tokens", "Draft tokens of this proposer accepted.", lambda p: p.num_accepted_tokens)
        yield each("wasted_tokens", "Draft tokens of this proposer verified and not kept.", lambda p: p.num_wasted_tokens)
        yield each("draft_seconds", "Time this proposer took to guess and to follow the text.", lambda p: p.draft_seconds)
        yield each("verify_seconds", "Its tokens' share of the time of target steps.", lambda p: p.verify_seconds)
        yield each("failures", "Steps in which this proposer failed.", lambda p: p.num_failures)
        works = self._gauges("foretoken:proposer_on", "0 for a proposer that was switched off after failures.", ("proposer",))
        for p in proposers:
            works.add_metric((*self._labels, p.name), p.off_reason is None)
        yield works

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = self._gauges(name, text, ())
        family.add_metric(self._labels, value)
        return family

    def _gauges(self, name: str, text: str, labels: tuple[str, ...]) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, text, labels=(*LABELS, *labels))

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counters(self, name: str, text: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
        family = CounterMetricFamily(name, text, labels=(*LABELS, label))
        for of, value in values:
            family.add_metric((*self._labels, of), value)
        return family


def share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
