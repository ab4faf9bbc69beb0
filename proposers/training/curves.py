"""A training's log as a CSV file, and its curves as a picture."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = 128


def append_row(table: Path, row: Mapping[str, float]) -> None:
    """Add a row; new columns are added to the rows before it as empty cells."""
    rows = read_rows(table)
    columns = list(dict.fromkeys([*(name for old in rows[:1] for name in old), *row]))
    cells = {name: f"{value:.6g}" if isinstance(value, float) else str(value) for name, value in row.items()}
    if rows and list(rows[0]) == columns:
        with table.open("a", newline="") as lines:
            csv.DictWriter(lines, columns, restval="").writerow(cells)
        return
    with table.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, columns, restval="")
        writer.writeheader()
        writer.writerows([*rows, cells])


def read_rows(table: Path) -> list[dict[str, str]]:
    if not table.exists():
        return []
    with table.open(newline="") as lines:
        return list(csv.DictReader(lines))


def plot(table: Path, image: Path) -> None:
    """Losses above, shares such as accuracies below, over millions of tokens; training thin, held out with dots.

    Nothing if matplotlib is not installed or nothing was logged.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    rows = read_rows(table)
    if not rows:
        return
    names = [name for name in rows[0] if "loss" in name or "accuracy" in name or "accepted" in name]
    panels = [[name for name in names if "loss" in name], [name for name in names if "loss" not in name]]
    panels = [panel for panel in panels if panel]
    figure = Figure(figsize=(7, 3 * len(panels)))
    for place, panel in enumerate(panels):
        axes = figure.add_subplot(len(panels), 1, place + 1)
        for name in panel:
            points = [(float(row["tokens"]) / 1e6, float(row[name])) for row in rows if row[name]]
            held_out = name.startswith("held_out")
            axes.plot(
                [x for x, _ in points], [y for _, y in points], label=name.replace("_", " "),
                linewidth=1.2 if held_out else 0.7, marker="o" if held_out else "", markersize=3,
            )
        axes.set(ylabel="nats per token" if "loss" in panel[0] else "share or tokens")
        axes.legend(fontsize=7)
        axes.grid(alpha=0.3)
    figure.axes[-1].set(xlabel="million tokens")
    save_picture(figure, image, 90)


def save_picture(figure: Figure, image: Path, dpi: int) -> None:
    """A PNG with a palette, a quarter of the usual size: pictures lie beside the weights that they are of."""
    from PIL import Image

    drawn = BytesIO()
    figure.savefig(drawn, dpi=dpi, bbox_inches="tight")
    Image.open(drawn).convert("RGB").quantize(COLOURS).save(image, "PNG", optimize=True)
