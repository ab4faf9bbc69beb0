"""An evaluation's figures as a table and as pictures: accepted lengths and speed-ups by method and domain. Measures nothing."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...proposers.training.curves import save_picture

Row = Mapping[str, Any]
ALL = "all"


def speed_table(rows: Sequence[Row], machine: str) -> str:
    """Markdown: a line for each method, batch and temperature, a column for each domain; speed-ups, and plain tokens/s for scale."""
    domains = _in_order(row["domain"] for row in rows)
    found = {(row["method"], row["batch"], row["temperature"], row["domain"]): row for row in rows}
    cases = sorted({(row["batch"], row["temperature"]) for row in rows})
    lines = [
        f"Tokens per second end to end through `foretoken serve`, as multiples of those without speculation, with k = {rows[0]['k']}; "
        "in the lines of `off`, tokens per second themselves. "
        f"The last column is the geometric mean. Measured on {machine}.",
        "",
        f"| batch | temperature | method | {' | '.join(domains)} | {ALL} |",
        f"|{'---|' * (len(domains) + 4)}",
    ]
    for batch, temperature in cases:
        methods = _in_order(row["method"] for row in rows if (row["batch"], row["temperature"]) == (batch, temperature))
        plain = [
            statistics.median(row["plain_tokens_per_s"] for row in rows
                              if (row["batch"], row["temperature"], row["domain"]) == (batch, temperature, domain))
            for domain in domains
        ]
        lines.append(f"| {batch} | {temperature:g} | off | {' | '.join(f'{value:.0f}' for value in plain)} | |")
        for method in methods:
            speedups = [found.get((method, batch, temperature, domain), {}).get("speedup") for domain in domains]
            cells = ["-" if value is None else f"{value:.2f}" for value in speedups]
            known = [value for value in speedups if value is not None]
            lines.append(f"| {batch} | {temperature:g} | {method} | {' | '.join(cells)} | {statistics.geometric_mean(known):.2f} |")
    same, total = (sum(row[name] for row in rows) for name in ("same_answers", "answers"))
    lines += ["", f"{same:,} of {total:,} answers were, letter for letter, those of the same request without speculation."]
    return "\n".join(lines) + "\n"


def speed_plot(rows: Sequence[Row], path: Path) -> None:
    """Speed-ups, one panel for each batch (down) and temperature (across). Nothing without matplotlib."""
    batches, temperatures = sorted({row["batch"] for row in rows}), sorted({row["temperature"] for row in rows})
    panels = [
        (f"batch {batch}, temperature {temperature:g}",
         _with_mean([row for row in rows if (row["batch"], row["temperature"]) == (batch, temperature)]))
        for batch in batches for temperature in temperatures
    ]
    _heat_maps(panels, lambda row: row["speedup"], len(temperatures), "tokens/s over tokens/s without speculation", path, middle=1.0)


def acceptance_plot(rows: Sequence[Row], path: Path) -> None:
    """Mean accepted lengths, one panel for each k. Nothing without matplotlib."""
    ks = sorted({row["k"] for row in rows})
    panels = [(f"k = {k}", [row for row in rows if row["k"] == k]) for k in ks]
    _heat_maps(panels, lambda row: row["mean_accepted_length"], len(ks), "mean accepted length: tokens per target pass, greedy", path)


def _with_mean(rows: Sequence[Row]) -> list[Row]:
    by_method = {method: [row["speedup"] for row in rows if row["method"] == method] for method in _in_order(row["method"] for row in rows)}
    return [*rows, *({"method": name, "domain": ALL, "speedup": statistics.geometric_mean(some)} for name, some in by_method.items())]


def _heat_maps(
    panels: Sequence[tuple[str, Sequence[Row]]], value_of: Callable[[Row], float], across: int, title: str, path: Path,
    middle: float | None = None
) -> None:
    """Methods down, domains across, every value written in its place. middle: the value between two colours, None = one colour."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    shown = [row for _, rows in panels for row in rows]
    methods = _in_order(row["method"] for row in shown)
    domains = [*(domain for domain in _in_order(row["domain"] for row in shown) if domain != ALL), ALL]
    values = [value_of(row) for row in shown]
    low, high, colours = min(values), max(values), "Greens"
    if middle is not None:
        reach = max(abs(high - middle), abs(low - middle), 0.1)
        low, high, colours = middle - reach, middle + reach, "RdYlGn"
    down = -(-len(panels) // across)
    width, height = 1.6 + 0.62 * len(domains), 1.3 + 0.34 * len(methods)
    figure = Figure(figsize=(width * across, height * down + 0.4), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False)
    for axes, (name, rows) in zip(grid.flat, panels, strict=True):
        known = {(row["method"], row["domain"]): value_of(row) for row in rows}
        table = [[known.get((method, domain), float("nan")) for domain in domains] for method in methods]
        axes.imshow(table, cmap=colours, vmin=low, vmax=high, aspect="auto", alpha=0.7)
        for (method, domain), value in known.items():
            axes.text(domains.index(domain), methods.index(method), f"{value:.2f}", ha="center", va="center", fontsize=7)
        axes.set_xticks(range(len(domains)), domains, rotation=40, ha="right", fontsize=8)
        axes.set_yticks(range(len(methods)), methods, fontsize=8)
        axes.set_title(name, fontsize=9)
    figure.suptitle(title, fontsize=10)
    save_picture(figure, path, 110)


def _in_order(names: Iterable[str]) -> list[str]:
    """Each once, as they first come."""
    return list(dict.fromkeys(names))
