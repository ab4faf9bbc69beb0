"""The arrows of the architecture, held by a test: server > engine > proposers > kernels, and what may not appear at all."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ["kernels", "proposers", "engine", "server"]  # a layer may import itself and what stands before it
FILES = [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "vllm"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIRED = {
    re.split("[<>=; ]", line)[0].replace("-", "_").replace("pyyaml", "yaml")
    for line in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["bench"], *PROJECT["optional-dependencies"]["gpu"])
}
COMPANIONS = {"starlette", "h11", "pydantic_core", "huggingface_hub", "PIL"}  # whose versions those required see to
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "yaml.load"}


def imported_layers(path: Path, tree: ast.Module) -> set[str]:
    """Layers that a file imports through relative imports."""
    found: set[str] = set()
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            full = (*base, *(node.module or "").split("."))
            names = [full] if node.module else [(*base, alias.name) for alias in node.names]
            found |= {name[0] for name in names if name and name[0] in LAYERS}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    layer = path.relative_to(ROOT).parts[0]
    allowed = set(LAYERS[: LAYERS.index(layer) + 1])
    assert imported_layers(path, ast.parse(path.read_text())) <= allowed


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_inside_the_package_are_relative_and_nothing_dangerous_is_used(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                roots = {alias.name.split(".")[0] for alias in names}
            case ast.ImportFrom(module=str(module), level=0):
                roots = {module.split(".")[0]}
            case ast.Call(func=func):
                assert ast.unparse(func) not in FORBIDDEN_CALLS, f"line {node.lineno}"
                continue
            case _:
                continue
        assert roots.isdisjoint({"foretoken", *LAYERS}), f"line {node.lineno}: import relatively"
        assert roots.isdisjoint(FORBIDDEN_MODULES), f"line {node.lineno}"
        assert roots <= {"__future__", *sys.stdlib_module_names, *REQUIRED, *COMPANIONS}, f"line {node.lineno}: not in pyproject.toml"


SERVING = [path for path in FILES if {"training", "bench"}.isdisjoint(path.relative_to(ROOT).parts)]


@pytest.mark.parametrize("path", SERVING, ids=lambda p: str(p.relative_to(ROOT)))
def test_tensors_of_floats_say_of_which(path: Path) -> None:
    """The default is the process's, whose other code may have set it; native code reads what it is given as it expects it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{name}" for name in ("zeros", "ones", "empty", "full")}:
            assert "dtype" in {keyword.arg for keyword in node.keywords}, f"line {node.lineno}"


def test_the_core_knows_no_clock_no_asyncio_and_no_web() -> None:
    for name in ("core", "scheduler", "kv_cache", "committer", "controller", "plan", "runner", "verifier", "sampler"):
        tree = ast.parse((ROOT / "engine" / f"{name}.py").read_text())
        roots = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert roots.isdisjoint({"asyncio", "threading", "fastapi", "httpx"}), name
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert calls.isdisjoint({"time.time", "time.monotonic", "time.perf_counter"}), name


def test_kernels_is_no_package_of_its_own() -> None:
    """transformers imports a package called `kernels` if it finds one: ours must never be it."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_types_are_announced_to_type_checkers_of_other_projects() -> None:
    package_data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert "py.typed" in package_data["foretoken"] and (ROOT / "py.typed").is_file()


def test_importing_the_face_loads_nothing_heavy() -> None:
    import subprocess

    code = "import foretoken, sys; print([m for m in ('torch', 'transformers', 'fastapi') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd="/")
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "server").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_answers_in_json_are_written_by_one_encoder(path: Path) -> None:
    """Which takes a tenth of the time of Starlette's for embeddings."""
    named = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
    assert "JSONResponse" not in named, "an answer is a JsonAnswer"
