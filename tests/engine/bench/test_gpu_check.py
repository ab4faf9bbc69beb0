"""`make gpu-check` tried out without a GPU: all cases on a tiny network, what goes wrong, and the page."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from foretoken.engine.bench.gpu_bench import Figure
from foretoken.engine.bench.gpu_cases import CASES
from foretoken.engine.bench.gpu_check import _run_tests, main, read_tests, run_cases
from foretoken.engine.bench.gpu_report import CaseResult, Report, TestResult

ROOT = Path(__file__).parents[3]
SCRIPTED = """
import json, os, sys, time
for name in sys.argv[sys.argv.index("--worker") + 1 :]:
    print("a library says something")
    figure = {"case": name, "name": "x", "value": 2.0, "unit": "ms"}
    print("@gpu-check " + json.dumps({"figure": figure}), flush=True)
    if name == "dies":
        print("illegal memory access", flush=True)
        os._exit(3)
    if name == "hangs":
        time.sleep(60)
    print("@gpu-check " + json.dumps({"error": "ValueError: no" if name == "fails" else ""}), flush=True)
    if name == "fails":
        sys.exit(1)
"""


def test_whatever_a_case_does_the_others_are_measured(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(SCRIPTED)
    names = ["a", "dies", "b", "hangs", "fails", "c"]
    found = list(run_cases(names, [sys.executable, str(script)], time.monotonic() + 60, case_s=5.0))
    assert [case.name for case in found] == names
    assert all(case.figures == [Figure(case.name, "x", 2.0, "ms")] for case in found)
    errors = {case.name: case.error for case in found}
    assert errors["a"] == errors["b"] == errors["c"] == ""
    assert "status 3" in errors["dies"] and "illegal memory access" in errors["dies"]
    assert errors["hangs"].startswith("stopped after ") and errors["fails"] == "ValueError: no"


def test_nothing_is_begun_when_time_is_over(tmp_path: Path) -> None:
    found = list(run_cases(["a", "b"], [sys.executable, "-c", "raise SystemExit(1)"], time.monotonic() - 1))
    assert [case.error for case in found] == ["not run: no time was left"] * 2


def test_tests_are_counted_however_far_they_came() -> None:
    lines = [
        "tests/gpu/test_a.py::test_one[long prompt] PASSED       [ 10%]",
        "tests/gpu/test_a.py::test_one[long tree] PASSED       [ 10%]",
        "[gw3] [ 20%] FAILED tests/gpu/test_a.py::test_two",
        "tests/gpu/test_b.py::test_three SKIPPED (there is no GPU) [ 30%]",
        "E   assert 1 == 2",
    ]
    found = read_tests(lines)
    assert (found.summary, found.failed) == ("1 failed, 2 passed, 1 skipped", ["tests/gpu/test_a.py::test_two"])
    told = read_tests([*lines, "@because tests/gpu/test_a.py::test_two\tassert 1 == 2"])
    assert told.failed == ["tests/gpu/test_a.py::test_two: assert 1 == 2"] and told.summary == found.summary
    assert read_tests(["ImportError: no"]).failed == ["no test ran"]


@pytest.mark.parametrize("said", ["ERROR tests/gpu/test_c.py", "ERROR tests/gpu/test_c.py - ModuleNotFoundError: No module named 'x'"])
def test_a_file_that_cannot_be_imported_has_failed(said: str) -> None:
    found = read_tests(["tests/gpu/test_a.py::test_one PASSED [100%]", said])
    assert (found.summary, found.failed) == ("1 error, 1 passed", ["tests/gpu/test_c.py"])


def test_a_file_that_cannot_be_imported_stops_no_other(tmp_path: Path) -> None:
    (tmp_path / "test_bad.py").write_text("import a_package_that_is_not_there\n")
    (tmp_path / "test_good.py").write_text("def test_one():\n    pass\ndef test_two():\n    assert 1 == 2\n")
    said = "\n".join(_run_tests([str(tmp_path)], 120.0).tail)
    assert "1 passed" in said and "test_good.py::test_two\tassert 1 == 2" in said


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "--tiny --device cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cases", "tests"),
    [
        (["verification", "recurrent", "decode", "profile", "synthetic", "eagle", "guessing"], ["--no-tests"]),
        pytest.param(list(CASES), ["--test-paths", "tests/gpu/test_graphs.py"], marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
@pytest.mark.slow
def test_the_whole_script_on_a_tiny_network(cases: list[str], tests: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "foretoken.engine.bench.gpu_check", "--tiny", "--device", "cpu", "--out", str(tmp_path)]
    ran = subprocess.run(
        [*command, "--cases", *cases, *tests], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = json.loads((tmp_path / "gpu-cpu.json").read_text())
    assert [case["name"] for case in said["cases"]] == cases
    assert all(case["figures"] and not case["error"] for case in said["cases"])
    assert any(word in said["tests"]["summary"] for word in (("not run",) if "--no-tests" in tests else ("skipped", "passed")))
    figures = {(figure["case"], figure["name"]): figure["value"] for case in said["cases"] for figure in case["figures"]}
    assert figures["profile", "steps begun ahead and used"] > 0.7
    assert figures["synthetic", "against plain decoding"] > 0
    page = (tmp_path / "gpu-cpu.md").read_text()
    assert "| synthetic: against plain decoding |" in page and "What went wrong" not in page


def test_the_page_says_what_is_kept_and_what_went_wrong(tmp_path: Path) -> None:
    report = Report("NVIDIA H200", "torch 2.11", "make gpu-check", 12.0, TestResult("1 failed, 3 passed", ["tests/gpu/test_a.py::test_b"]))
    report.cases = [
        CaseResult("decode", [Figure("decode", "share", 0.9, "", 0.85), Figure("verification", "8 against 1", 1.2, "x", 1.08, "less")]),
        CaseResult("throughput", [Figure("throughput", f"ours, {n} tokens each", 875.0 * n, "tokens/s") for n in (32, 256)]),
        CaseResult("transformers", [Figure("throughput", "transformers, 32 tokens each", 4000.0, "tokens/s")]),
        CaseResult("fp8", [], 3.0, "RuntimeError at fp8.py:50: no"),
    ]
    page = report.save(tmp_path)
    text = page.read_text()
    assert page.name == "gpu-nvidia-h200.md" and page.with_suffix(".json").exists()
    assert "| decode: share | 0.9  | at least 0.85 | kept |" in text
    assert "| verification: 8 against 1 | 1.2 x | at most 1.08 | **missed** |" in text
    assert "| throughput: ours against transformers', 32 tokens each | 7 x | at least 5 | kept |" in text
    assert "- failed: `tests/gpu/test_a.py::test_b`" in text and "- **fp8** (after 3 s): `RuntimeError at fp8.py:50: no`" in text
