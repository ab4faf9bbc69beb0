import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from speculation_figures import USUAL, figures

from foretoken.engine.bench.speculation_figures import Setting
from foretoken.engine.bench.speculation_plot import plot
from foretoken.engine.bench.speculation_report import closing, paste, tables

NGRAM = Setting("ngram", 3)
FOUND = [USUAL, figures(NGRAM, 1.1), figures(Setting("draft_model", 3, True), 1.8), figures(NGRAM, 1.0, 8, rate=None, mu=0.0)]


def test_all_figures_are_in_the_tables() -> None:
    pages = {table.title: table.markdown() for table in tables(FOUND, USUAL)}
    speed = pages["Speed, one request at a time"]
    for word in ("Baseline", "Speculative", "Speedup", "Acceptance rate", "mu", "mean accepted length"):
        assert word in speed
    row = next(line for line in speed.splitlines() if "draft_model, k=3" in line)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == ["draft_model, k=3", "100.0", "200.0", "2.00x", "1.98-2.02", "80.0 %", "2.40", "3.40", "3.00", "100%"]
    economics = next(line for line in pages["Where the gain goes, one request at a time"].splitlines() if "draft_model, k=3" in line)
    published, predicted, measured = (cell.strip() for cell in economics.strip("|").split("|")[3:6])
    assert (published, predicted, measured) == ("2.54x", "2.27x", "2.00x")
    assert "draft_cost_ratio" in pages["Where the gain goes, one request at a time"]
    assert "| 90% | 80% | 70% |" in pages["Acceptance per position"]
    assert "| - |" in pages["Speed, 8 requests at a time"].replace("  ", ""), "nothing was guessed"
    assert "prompt 1" in pages["Requests of the last round, draft_model, k=3, one request at a time"]
    assert len(tables(FOUND)) == len(pages) - 1


def test_the_last_lines_are_what_people_look_for() -> None:
    text = closing(USUAL, "80 %: keep it.", [{"method": "ngram"}])
    lines = text.splitlines()
    assert lines[1:3] == ["  Baseline:         100.0 tokens/s", "  Speculative:      200.0 tokens/s"]
    assert lines[3:5] == ["  Speedup:          2.00x (1.98-2.02)", "  Acceptance rate:  80.0 %"]
    assert lines[-2:] == ["80 %: keep it.", "--speculative-config '{\"method\": \"ngram\"}'"]


def test_what_is_pasted_comes_back_from_a_shell() -> None:
    entries = [{"method": "draft_model", "model": "it's here"}, {"method": "ngram"}]
    flag, value = shlex.split(paste(entries))
    assert flag == "--speculative-config" and json.loads(value) == entries


def test_the_plot_is_a_picture_that_says_what_its_points_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    drawn: list[Any] = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    plot(FOUND, tmp_path / "plot.png", "a machine")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"
    curves = drawn[0].axes[1]
    fixed = sorted({f.setting.k for f in FOUND if not f.setting.adaptive})
    assert [tick.get_text() for tick in curves.get_xticklabels()] == [*map(str, fixed), "adaptive"]
    assert "draft_model, 1 at a time" in curves.get_legend_handles_labels()[1], "it has no curve, only a star"
    monkeypatch.undo()
    pyplot.close(drawn[0])
