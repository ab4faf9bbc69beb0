"""Every kernel is built for an H200, down to machine code, in the shapes of real models: what the interpreter takes a compiler may not."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from variants import slow_but

HERE = Path(__file__).parent
SHARED_BYTES = 227 * 1024  # that one program may have
REGISTERS = 64 * 1024  # of a multiprocessor
READ_EARLY = {"attend", "_rms_norm", "_rotate_and_store"}  # weights, or the batch, which a product before them has waited for
LONG = {"_linear", "_linear_int4", "_visit"}  # kernels that let the next come when they are nearly done


def build(group: str, cache: Path) -> list[dict[str, Any]]:
    found = built(group, cache)
    for one in found:
        assert one["spilled_bytes"] <= 32, "registers are kept in memory"
        assert one["shared_bytes"] <= SHARED_BYTES
        assert one["registers"] * 32 * one["warps"] <= REGISTERS
    return found


def built(group: str, cache: Path, *capability: str) -> list[dict[str, Any]]:
    """In a process of its own: here kernels are interpreted."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    known = [Path(path).resolve() for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    variables |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(map(str, [HERE.parents[1] / "support", *known]))}
    command = [sys.executable, HERE / "compile_kernels.py", group, *capability]
    run = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout)
    for one in found:
        print(*(f"{name}={value}" for name, value in one.items() if name != "code"))
    return found


def check_attention(one: dict[str, Any]) -> None:
    code = one["code"]
    assert "wgmma" in code or "mma.sync" in code, "no tensor cores"
    at_once = min(SHARED_BYTES // one["shared_bytes"], REGISTERS // (one["registers"] * 32 * one["warps"]))
    assert _loads_ahead(code) >= 2 or at_once >= 2, "a tile is fetched when it is needed, and nobody computes meanwhile"
    check_widening(code)


def check_product(one: dict[str, Any]) -> None:
    code = one["code"]
    assert "wgmma" in code or "mma.sync" in code, "no tensor cores"
    assert _loads_ahead(code) >= 4, "too few weights are on their way"
    check_widening(code)
    if "e4m3" in code and "wgmma" in code:  # which 64 columns at a time are multiplied by
        check_first_operand(code)


def check_widening(code: str) -> None:
    """From e4m3, two numbers an instruction: one by one they go through the unit that has a quarter of the lanes."""
    assert not re.search(r"cvt(\.rn)?\.bf16\.f16", code), "8-bit floats take longer to be widened than to be read"


def check_narrow_product(one: dict[str, Any]) -> None:
    code = one["code"]
    assert _loads_ahead(code) >= 4, "too few weights are on their way"
    check_first_operand(code)


def check_first_operand(code: str) -> None:
    from_registers = re.search(r"wgmma\.mma_async\S+m64\S+\s+\{[^}]*\},\s*\{", code)
    assert from_registers, "weights that were made whole go through memory"
    assert code.count("wgmma.wait_group") == 1, "more than the products of a tile are waited for by themselves"


def test_one_of_each(tmp_path: Path):
    """The first of what the next three build."""
    checks = {"attend": check_attention, "_linear": check_product, "_linear_int4": check_narrow_product}
    found = [one for one in build("one_of_each", tmp_path) if one["name"] in checks]
    assert {one["name"] for one in found} == set(checks)
    for one in found:
        checks[one["name"]](one)


@pytest.mark.slow
@pytest.mark.parametrize("group", ["attention_of_llama", "attention_of_others", "attention_over_float8"])
def test_attention(group: str, tmp_path: Path):
    for one in build(group, tmp_path):
        if one["name"] == "attend":
            check_attention(one)


@pytest.mark.parametrize("group", slow_but(["latent_attention"], ["latent_attention", "other_latent_attention"]))
def test_latent_attention(group: str, tmp_path: Path):
    for one in build(group, tmp_path):
        if one["name"] == "attend":
            check_attention(one)
        if one["name"] == "_block_linear":
            assert "wgmma" in one["code"] or "mma.sync" in one["code"], "no tensor cores"


@pytest.mark.slow
def test_latent_attention_of_many_rows(tmp_path: Path):
    """Sums of 64 rows are half of all registers: what lies in memory for them is but addresses, and masks of what comes behind the loop."""
    for one in built("latent_attention_of_many_rows", tmp_path):
        assert one["spilled_bytes"] <= 352 and one["shared_bytes"] <= SHARED_BYTES
        if one["name"] == "attend":
            check_attention(one)
            assert "m64n256k16" in one["code"]


@pytest.mark.slow
def test_attention_fits_where_programs_have_less_memory(tmp_path: Path):
    """As on Ada, and on Ampere and Blackwell for desktops: of heads as wide as Gemma's, too."""
    found = built("attention_on_a_desktop", tmp_path, "89")
    assert max(one["shared_bytes"] for one in found) <= 99 * 1024


@pytest.mark.slow
def test_attention_is_built_once_for_any_number_of_rows(tmp_path: Path):
    assert build("attention_of_any_number_of_rows", tmp_path)


@pytest.mark.slow
def test_products(tmp_path: Path):
    for one in build("products", tmp_path):
        check_product(one)


@pytest.mark.slow
def test_narrow_products(tmp_path: Path):
    for one in build("narrow_products", tmp_path):
        if one["name"] != "_dequantise":
            check_narrow_product(one)


@pytest.mark.slow
def test_experts(tmp_path: Path):
    for one in build("experts_of_models", tmp_path):
        if one["name"] == "_visit":
            assert "wgmma" in one["code"] or "mma.sync" in one["code"], "no tensor cores"
            assert _loads_ahead(one["code"]) >= 2, "a tile is fetched when it is needed"
            check_widening(one["code"])


@pytest.mark.parametrize("group", slow_but(["recurrent_layers"], ["recurrent_layers", "other_recurrent_layers"]))
def test_recurrent_layers(group: str, tmp_path: Path):
    for one in build(group, tmp_path):
        assert one["spilled_bytes"] == 0 or one["name"] != "_scan"


@pytest.mark.slow
def test_programs_that_come_early_wait_before_they_write_and_before_they_read_what_a_pass_writes(tmp_path: Path):
    found = build("early", tmp_path)
    names = {"attend", "join", "fold", "_linear", "_linear_int4", "_rms_norm", "_quantise", "_activation", "_rotate_and_store", "_best"}
    names |= {"_route", "_group", "_visit", "_add_up", "_inner", "_outer", "_trace", "_convolve", "_scan", "_gated_norm", "_block_linear"}
    names |= {"_lay_out", "_choose", "_rows_of"}
    assert {one["name"] for one in found} == names | {"_dequantise"}
    writes = r"st\.global|cp\.async(?!\.bulk\.prefetch)|cp\.reduce|atom|red\."
    touches = re.compile(rf"\b(bulk\.prefetch|ld\.global|{writes}|griddepcontrol\.\w+)")
    for one in found:
        name, touched = one["name"], [touch for line in one["code"].splitlines() for touch in touches.findall(line)]
        before = touched[: touched.index("griddepcontrol.wait")]
        reads = {"ld.global"} if name in READ_EARLY else set()
        asks = {"bulk.prefetch"} if name.startswith("_linear") else set()
        lets = set() if name in LONG else {"griddepcontrol.launch_dependents"}
        assert set(before) == reads | asks | lets, name
        assert touched.count("griddepcontrol.launch_dependents") == 1, name


def test_the_logarithm_that_noise_is_made_of_is_as_exact_as_the_hosts(tmp_path: Path):
    """The kernels that tests write the noise out with can be built, too."""
    found = {one["name"]: one["code"] for one in build("of_tests", tmp_path)}
    assert set(found) == {"noise_under", "farthest"}
    for code in found.values():
        assert "lg2." not in code and code.count("fma.rn.f64") >= 10, "logarithms of less than float64"
    assert "mul.lo.s32" in found["noise_under"] and "shr.s32" not in found["noise_under"], "bits are lost, or signs spread"


# Those behind a pass are the kernels of choices, for one vocabulary.
@pytest.mark.parametrize("group", slow_but(["behind_a_pass"], ["small_ones", "choices", "chains", "behind_a_pass"]))
def test_others(group: str, tmp_path: Path):
    assert build(group, tmp_path)


def _loads_ahead(code: str) -> int:
    """Most groups of asynchronous copies that are still under way when the kernel waits for one."""
    waits = [line.split("cp.async.wait_group")[1] for line in code.splitlines() if "cp.async.wait_group" in line]
    return max(int(wait.strip(" \t;")) for wait in waits)
