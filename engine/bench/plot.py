"""Results as one picture: what verifying costs, and how near decoding comes to the machine's limit. Needs matplotlib."""

from pathlib import Path

from .measurement import LEVELS, NETWORK, PRECISIONS, Results

STYLES = ("-", "--", ":", "-.")


def plot(results: Results, path: Path) -> None:
    """Write a PNG. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    num_bars = len({(m.model, m.precision, m.x) for level in LEVELS for m in results.of(level, "decode")})
    figure, (curves, bars) = pyplot.subplots(1, 2, figsize=(14, max(6.0, 0.4 * num_bars)), layout="constrained")
    colours = {precision: f"C{i}" for i, precision in enumerate(PRECISIONS)}

    found = results.of(NETWORK, "verification")
    models = list(dict.fromkeys(m.model for m in found))
    for model, precision in dict.fromkeys((m.model, m.precision) for m in found):
        mine = sorted((m.x, m.ratio) for m in found if (m.model, m.precision) == (model, precision) and m.ratio)
        style = STYLES[models.index(model) % len(STYLES)]
        curves.plot(
            [x for x, _ in mine], [r.median for _, r in mine], style, color=colours[precision], marker=".", label=f"{model}, {precision}"
        )
        curves.fill_between(
            [x for x, _ in mine], [r.low for _, r in mine], [r.high for _, r in mine], color=colours[precision], alpha=0.1, lw=0
        )
    ticks = sorted({m.x for m in found})
    curves.set_xscale("log", base=2)
    curves.set_xticks(ticks, [str(t) for t in ticks])
    curves.set_ylim(bottom=0)
    curves.set_xlabel("tokens verified in one pass")
    curves.set_ylabel("cost, one token = 1")
    curves.set_title(f"Verification, context {results.effort.verified_context}")
    curves.grid(alpha=0.3)

    levels = [level for level in LEVELS if results.of(level, "decode")]
    contexts = sorted({m.x for level in levels for m in results.of(level, "decode")})
    groups = list(dict.fromkeys((m.model, m.precision, m.x) for level in levels for m in results.of(level, "decode")))
    groups.sort(key=lambda group: (contexts.index(group[2]), 0))  # stable: models and precisions as they were measured
    height = 0.8 / max(len(levels), 1)
    for number, level in enumerate(levels):
        shares = {(m.model, m.precision, m.x): m.ratio.median for m in results.of(level, "decode") if m.ratio}
        places = [i + (number - (len(levels) - 1) / 2) * height for i in range(len(groups))]
        bars.barh(places, [100 * shares.get(group, 0.0) for group in groups], height, label=level, color=f"C{number + 4}")
    bars.set_yticks(range(len(groups)), [f"{model}, {precision}, {context}" for model, precision, context in groups])
    bars.invert_yaxis()
    bars.axvline(100, color="black", lw=1)
    bars.set_xlabel("% of the rate at which the weights can be read")
    bars.set_title("Decode, one stream: model, precision, context")
    bars.grid(axis="x", alpha=0.3)

    for axes in (curves, bars):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.suptitle(
        f"{results.machine.cpu}, {results.machine.cores} cores, native executor: {results.machine.native.split(':')[0]}", fontsize=10
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
