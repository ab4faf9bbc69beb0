"""The comparison bench on tiny models: every variant is there, and drafting for oneself is mostly accepted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretoken.engine.compare import main


def test_every_variant_is_compared(tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    flags = ["--draft", str(tiny_target), "--k", "1,3", "--batch", "1,2", "--rounds", "1", "--max-tokens", "12", "--json", str(out)]
    main([str(tiny_target), *flags])
    results = json.loads(out.read_text())
    variants = [("off", 0), ("draft_model", 1), ("draft_model", 3), ("ngram", 1), ("ngram", 3)]
    assert [(r["batch"], r["method"], r["k"]) for r in results] == [(batch, *variant) for batch in (1, 2) for variant in variants]
    for r in results:
        if r["method"] == "off":
            assert r["speedup"] == 1.0 and r["mean_accepted_length"] == 1.0
        if r["method"] == "draft_model":
            assert r["acceptance_rate"] > 0.75 and r["mean_accepted_length"] > r["k"] * 0.75  # its copy may run in int8
    assert "speed-up" in capsys.readouterr().out
