"""The AMX code, its tiles emulated so that it runs on any machine with AVX-512 and VNNI: alone, under sanitizers, in a whole network."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from foretoken.kernels import native_library
from foretoken.kernels.native_abi import sources_digest

HERE = Path(__file__).parent
NATIVE = Path(native_library.__file__).with_name("native")
CHECKS = HERE / "native"
COMPILER = shutil.which("g++")
COMMON = ["-std=c++17", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-w", "-I", str(NATIVE)]
VECTORS = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mavx512bf16", "-mavx512vnni"]
TILES = ["-mamx-tile", "-mamx-bf16", "-mamx-int8"]
EMULATED = ["-DFT_EMULATE_TILES"]
SANITIZE = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
CLEAN = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # a sanitizer's library is not for compilers

if COMPILER is None:
    pytest.skip("there is no g++", allow_module_level=True)
if native_library.availability().isa not in ("avx512_bf16", "amx"):
    pytest.skip("this machine has no AVX-512 with BF16 and VNNI", allow_module_level=True)


def run(*command: object, **environment: str) -> str:
    done = subprocess.run([str(part) for part in command], env=CLEAN | environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def build(folder: Path, sources: dict[Path, list[str]], options: list[str], link: list[str]) -> Path:
    """Compile sources, each with its own options too, side by side; link them."""

    def compile_one(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        run(COMPILER, *COMMON, *options, *sources[source], "-c", source, "-o", target)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sources))
    run(COMPILER, *options, *objects, "-pthread", *link, "-o", folder / "result")
    return folder / "result"


def test_the_instructions_exist(tmp_path: Path) -> None:
    """Nothing here may be able to run them, but every shape's code must assemble."""
    run(COMPILER, *COMMON, "-O0", "-save-temps=obj", *VECTORS, *TILES, "-c", NATIVE / "isa_amx.cpp", "-o", tmp_path / "isa_amx.o")
    code = (tmp_path / "isa_amx.s").read_text()
    assert all(name in code for name in ("ldtilecfg", "tileloadd", "tdpbf16ps", "tdpbssd", "tilestored", "tilerelease"))


def test_linear_to_the_bit_and_within_its_memory(tmp_path: Path) -> None:
    program = build(tmp_path, {CHECKS / "linear_check.cpp": [*VECTORS, *EMULATED]}, SANITIZE, [])
    assert run(program) == "ok\n"


def test_ops_and_a_network_on_emulated_tiles(tmp_path: Path) -> None:
    """What is asked of every instruction set, asked of this one; integer products also equal those of VNNI to the bit."""
    common = [path for path in NATIVE.glob("*.cpp") if not path.stem.startswith("isa_") and path.stem != "cpu"]
    units = {NATIVE / "isa_amx.cpp": [*VECTORS, *EMULATED, "-O1"], NATIVE / "isa_avx512_bf16.cpp": VECTORS}
    units[NATIVE / "abi.cpp"] = [f'-DFT_SOURCES="{sources_digest(NATIVE)}"']
    library = build(tmp_path, dict.fromkeys([*common, CHECKS / "emulated_cpu.cpp"], []) | units, [], ["-shared"])
    wanted = "(amx and (bfloat16 or not shapes)) or integer_products or (any_arrangement and bfloat16 and (window or latent))"
    files = "test_native_ops.py", "test_native_blocks.py", "test_native_attention.py", "test_native_invariance.py"
    tests = [HERE / name for name in files]
    pytest_command = [sys.executable, "-m", "pytest", "-v", "-p", "emulated_library", "-p", "no:cacheprovider", "-k", wanted]
    report = run(*pytest_command, *tests, NATIVE_LIBRARY=str(library), PYTHONPATH=str(CHECKS), OMP_NUM_THREADS="1")
    assert "bfloat16-amx] PASSED" in report and "SKIPPED" not in report, report


@pytest.mark.skipif(not shutil.which("clang++"), reason="there is no clang")
@pytest.mark.slow
def test_clang_compiles_it_too(tmp_path: Path) -> None:
    for source in NATIVE.glob("*.cpp"):
        if not source.stem.startswith("isa_"):
            run("clang++", *COMMON, '-DFT_SOURCES=""', "-fsyntax-only", source)
