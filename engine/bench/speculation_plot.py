"""Speed-ups as one picture: a heat map of every setting by number of requests, and curves over k. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from .choice import by_setting
from .speculation_figures import Figures

STYLES = ("-", "--", ":", "-.")


def plot(found: Sequence[Figures], path: Path, title: str) -> None:
    """Write a PNG. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import TwoSlopeNorm

    grouped = by_setting(found)
    settings, numbers = list(grouped), sorted({f.concurrency for f in found})
    figure, (heat, curves) = pyplot.subplots(1, 2, figsize=(13, max(5.0, 0.3 * len(settings))), layout="constrained")

    speedups = {(f.setting, f.concurrency): f.speedup.median for f in found}
    values = [[speedups.get((setting, n), float("nan")) for n in numbers] for setting in settings]
    reach = max([abs(value - 1) for value in speedups.values()] + [0.1])
    image = heat.imshow(values, cmap="RdYlGn", norm=TwoSlopeNorm(1, max(0.0, 1 - reach), 1 + reach), aspect="auto")
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            heat.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=8)
    heat.set_xticks(range(len(numbers)), [str(n) for n in numbers])
    heat.set_yticks(range(len(settings)), [setting.label for setting in settings])
    heat.set_xlabel("requests at a time")
    heat.set_title("Speedup")
    figure.colorbar(image, ax=heat, label="no speculation = 1")

    methods = list(dict.fromkeys(setting.method for setting in settings))
    ks = sorted({setting.k for setting in settings if not setting.adaptive})
    beyond = max(ks, default=0) + 1
    for number, method in enumerate(methods):
        for style, n in enumerate(numbers):
            points = sorted((s.k, speedups[s, n]) for s in settings if s.method == method and not s.adaptive and (s, n) in speedups)
            label = f"{method}, {n} at a time"
            if points:
                line = STYLES[style % len(STYLES)]
                curves.plot([k for k, _ in points], [v for _, v in points], line, color=f"C{number % 10}", marker=".", label=label)
            if adaptive := [speedups[s, n] for s in settings if s.method == method and s.adaptive and (s, n) in speedups]:
                curves.plot(beyond, adaptive[0], "*", color=f"C{number % 10}", label=None if points else label)
                curves.annotate(str(n), (beyond, adaptive[0]), (5, 0), textcoords="offset points", va="center", fontsize=7)
    curves.axhline(1, color="black", lw=1)
    curves.set_xticks([*ks, beyond], [*map(str, ks), "adaptive"])
    curves.set_xlabel("k; beside a star: requests at a time")
    curves.set_ylabel("Speedup")
    curves.set_ylim(bottom=0)
    curves.grid(alpha=0.3)
    curves.legend(fontsize=7, ncols=2)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
