"""The README is true: all source files are named, its examples run. What holds for every document is in test_docs.py."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from running_server import RunningServer, environment

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
FENCED = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)


def test_every_source_file_is_in_the_tree() -> None:
    tree = next(text for _, text in FENCED if text.startswith("__init__.py"))
    named: set[str] = set()
    folders: list[str] = []
    for line in filter(None, tree.splitlines()):
        depth, names = (len(line) - len(line.lstrip())) // 2, line.strip().partition(": ")[0].split(", ")
        folders[depth:] = [names[0]]
        named.update("".join([*folders[:depth], name]) for name in names)
    sources = {str(p.relative_to(ROOT)) for folder in ("server", "engine", "proposers", "kernels") for p in (ROOT / folder).rglob("*.py")}
    missing = {name for name in sources if not name.endswith("__init__.py")} - named
    assert not missing, f"say in one line what these are: {sorted(missing)}"
    gone = {name for name in named if name.endswith(".py") and not (ROOT / name).is_file()}
    assert not gone, f"the tree names files that do not exist: {sorted(gone)}"


def test_what_is_run_here_is_what_everybody_runs() -> None:
    assert "make test" in README and "make test" in (ROOT / ".ci" / "run").read_text()


@pytest.fixture
def python_examples() -> list[str]:
    return [text for language, text in FENCED if language == "python"]


def test_the_sdk_example_streams_from_the_embedded_model(python_examples: list[str], server_process: Callable[..., RunningServer]) -> None:
    server = server_process("--speculative-config", '{"method": "draft_model", "adaptive": false}')  # on a busy machine nobody may guess
    code = python_examples[0].replace("http://127.0.0.1:8000", server.url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment())
    assert done.returncode == 0, done.stderr
    count = re.search(r"-- (\d+) tokens, ([\d.]+) per target pass", done.stdout)
    assert count and int(count[1]) > 5 and float(count[2]) >= 1.0
    with server.client() as client:
        metrics = client.get("/metrics").text
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        (line,) = [m for m in metrics.splitlines() if m.startswith(f"vllm:spec_decode_num_{name}_total{{")]
        assert float(line.split()[-1]) > 0, f"{name}: the counters must move"


def test_the_script_example_runs(python_examples: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", python_examples[1]], capture_output=True, text=True, timeout=120, env=environment())
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) >= 1.0


@pytest.mark.skipif(not shutil.which("make"), reason="there is no make")
def test_make_needs_a_python_that_can_do_it_and_begins_again_where_one_could_not(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    old = subprocess.run(["make", "install", "PYTHON=false"], cwd=tmp_path, capture_output=True, text=True, env=environment())
    assert old.returncode and "needs Python 3.11 or newer" in old.stdout and not (tmp_path / ".venv").exists()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ".venv"], cwd=tmp_path, check=True)  # as Debian does
    settings = environment(PIP_NO_INDEX="1", PIP_FIND_LINKS="")  # nothing is fetched: the act before is what is tested
    subprocess.run(["make", "install", f"PYTHON={sys.executable}"], cwd=tmp_path, capture_output=True, env=settings)
    assert (tmp_path / ".venv/bin/pip").exists()
