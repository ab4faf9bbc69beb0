"""What `LLM.get_metrics` returns: the engine's metrics in the shapes that vLLM's scripts read."""

from dataclasses import dataclass

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector


@dataclass(frozen=True)
class Metric:
    name: str
    labels: dict[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    value: float


@dataclass(frozen=True)
class Gauge(Metric):
    value: float


@dataclass(frozen=True)
class Vector(Metric):
    """Counters by depth in the draft."""

    values: list[int]


@dataclass(frozen=True)
class Histogram(Metric):
    """Of requests, whose times LLM tells in each output instead."""

    count: int
    sum: float
    buckets: dict[str, int]


def read(collector: Collector) -> list[Metric]:
    return [metric for family in collector.collect() for metric in _metrics(family)]


def _metrics(family: Family) -> list[Metric]:
    if family.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
        labels = {name: value for sample in family.samples[:1] for name, value in sample.labels.items() if name != "position"}
        return [Vector(family.name, labels, [int(sample.value) for sample in family.samples])]
    kind = Counter if family.type == "counter" else Gauge
    return [kind(family.name, sample.labels, sample.value) for sample in family.samples]
