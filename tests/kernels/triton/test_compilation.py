"""Every kernel is built for an H200, down to machine code, in the shapes of real models: what the interpreter takes a compiler may not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SHARED_BYTES = 227 * 1024  # that one program may have
REGISTERS = 64 * 1024  # of a multiprocessor


def build(group: str, cache: Path) -> list[dict[str, Any]]:
    """In a process of its own: here kernels are interpreted."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    known = [Path(path).resolve() for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    variables |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(map(str, [HERE.parents[1] / "support", *known]))}
    run = subprocess.run([sys.executable, HERE / "compile_kernels.py", group], env=variables, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout)
    for one in found:
        print(*(f"{name}={value}" for name, value in one.items() if name != "code"))
        assert one["spilled_bytes"] <= 16, "registers are kept in memory"
        assert one["shared_bytes"] <= SHARED_BYTES
        assert one["registers"] * 32 * one["warps"] <= REGISTERS
    return found


SLOW_ATTENTION = [pytest.param(group, marks=pytest.mark.slow) for group in ("attention_of_others", "attention_over_float8")]


@pytest.mark.parametrize("group", ["attention_of_llama", *SLOW_ATTENTION])
def test_attention(group: str, tmp_path: Path):
    for one in build(group, tmp_path):
        if one["name"] == "attend":
            assert "wgmma" in one["code"] or "mma.sync" in one["code"], "no tensor cores"
            assert _loads_ahead(one["code"]) >= 2, "a tile is fetched when it is needed"


def test_products(tmp_path: Path):
    for one in build("products", tmp_path):
        assert "wgmma" in one["code"] or "mma.sync" in one["code"], "no tensor cores"
        assert _loads_ahead(one["code"]) >= 4, "too few weights are on their way"


def test_narrow_products(tmp_path: Path):
    for one in build("narrow_products", tmp_path):
        if one["name"] == "_dequantise":
            continue
        from_registers = re.search(r"wgmma\.mma_async\S+m64\S+\s+\{[^}]*\},\s*\{", one["code"])
        assert from_registers, "weights that were made whole go through memory"
        assert _loads_ahead(one["code"]) >= 4, "too few weights are on their way"


@pytest.mark.parametrize("group", [pytest.param("small_ones", marks=pytest.mark.slow), "choices", "behind_a_pass"])
def test_others(group: str, tmp_path: Path):
    assert build(group, tmp_path)


def _loads_ahead(code: str) -> int:
    """Most groups of asynchronous copies that are still under way when the kernel waits for one."""
    waits = [line.split("cp.async.wait_group")[1] for line in code.splitlines() if "cp.async.wait_group" in line]
    return max(int(wait.strip(" \t;")) for wait in waits)
