"""The files that `foretoken bench serve` writes: JSON, CSV and a picture."""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .serve_load import Run
from .serve_results import METRICS, times

SCHEMA = 1
CURVES = ("ttft", "tpot", "e2el")


def write_json(path: Path, command: str, runs: Sequence[Mapping[str, Any]]) -> None:
    path.write_text(json.dumps({"schema": SCHEMA, "command": command, "runs": runs}, indent=1), encoding="utf-8")


def write_each(folder: Path, name: str | None, runs: Sequence[Mapping[str, Any]]) -> list[Path]:
    """A flat file for each run, as `vllm bench serve --save-result` writes it. Returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for run in runs:
        load = f"{run['request_rate']}qps" + (f"-concurrency{run['max_concurrency']}" if run["max_concurrency"] else "")
        model = Path(run["model_id"]).name
        stem = name.removesuffix(".json") if name else f"{run['label'] or run['backend']}-{load}-{model}-{run['date']}"
        path = folder / f"{stem}{f'-{load}' if name and len(runs) > 1 else ''}.json"
        path.write_text(json.dumps(run), encoding="utf-8")
        paths.append(path)
    return paths


def write_csv(path: Path, runs: Sequence[Mapping[str, Any]]) -> None:
    """A row for each run with every figure that is one number or text."""
    columns = list(dict.fromkeys(name for run in runs for name, value in run.items() if not isinstance(value, list | dict)))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(runs)


def plot(path: Path, runs: Sequence[Run], fields: Sequence[Mapping[str, Any]]) -> None:
    """Distributions of three latencies, a curve for each run, and the throughput of all runs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    panels = [figure.add_subplot(2, 2, number) for number in (1, 2, 3, 4)]
    labels = [_label(run) for run in runs]
    for panel, metric in zip(panels, CURVES, strict=False):
        for run, label in zip(runs, labels, strict=True):
            values = sorted(value * 1e3 for value in times(metric, run.answers))
            if values:
                panel.step([values[0], *values], [n / len(values) for n in range(len(values) + 1)], where="post", label=label)
        panel.set(title=METRICS[metric], xlabel="ms", ylabel="share of requests", ylim=(0, 1.02))
        panel.grid(alpha=0.3)
    panels[0].legend()
    throughput = [one["output_throughput"] for one in fields]
    bars = panels[3].bar(range(len(runs)), throughput, color="tab:blue")
    panels[3].bar_label(bars, [f"{value:.0f}" for value in throughput])
    panels[3].set_xticks(range(len(runs)), labels)
    panels[3].set(title="Output Token Throughput", ylabel="tokens/s")
    figure.suptitle(fields[0]["model_id"])
    figure.savefig(path, dpi=120)


def _label(run: Run) -> str:
    rate = "" if math.isinf(run.load.request_rate) else f"{run.load.request_rate:g}/s"
    places = f"{run.load.concurrency} at once" if run.load.concurrency else ""
    return ", ".join(part for part in (rate, places) if part) or "all at once"
