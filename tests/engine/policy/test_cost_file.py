"""What steps cost is found again at the next start, and never believed of anything else."""

import json
import logging
import os
import pwd
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foretoken.engine.cache_folder import cache_folder
from foretoken.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from foretoken.engine.model import load_model
from foretoken.engine.policy.cost_file import CostFile, conditions
from foretoken.engine.policy.costs import CostFigures
from foretoken.proposers.config import DraftModelConfig, NgramConfig, SpeculativeConfig

FIGURES = CostFigures({1: 1e-3, 4: 1.5e-3, 8: 3e-3}, 2e-7, {"ngram": {(1, 1): 1e-5, (5, 1): 2e-5, (1, 8): 3e-5, (5, 8): 9e-5}})
CONDITIONS = {"model": "a", "cpu": "b"}


def test_figures_come_back(tmp_path: Path) -> None:
    file = CostFile.of(CONDITIONS, tmp_path / "deep" / "er")
    assert file.load(["ngram"]) is None
    file.save(FIGURES)
    assert CostFile.of(dict(reversed(CONDITIONS.items())), tmp_path / "deep" / "er").load(["ngram"]) == FIGURES
    assert CostFile.of(CONDITIONS | {"cpu": "another"}, tmp_path / "deep" / "er").load(["ngram"]) is None
    file.save(CostFigures({1: 2e-3, 2: 2e-3}))
    assert file.load(["ngram"]) == CostFigures({1: 2e-3, 2: 2e-3}, 0.0, {})
    file.save(CostFigures({1: 2e-3}, passes={1: 1e-3, 2: 1.1e-3}))
    assert file.load(["ngram"]) == CostFigures({1: 2e-3}, 0.0, {}, {1: 1e-3, 2: 1.1e-3})
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name], "no half-written file stays"


def change(**values: Any) -> Callable[[str], str]:
    return lambda text: json.dumps(json.loads(text) | values)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "null",
        lambda text: "[" * 100_000,
        lambda text: "\x00" * 100,
        lambda text: text + " " * (1 << 20),
        change(format=1),
        change(conditions={"model": "another", "cpu": "b"}),
        change(target={}),
        change(target=[1, 2]),
        change(target={"1": 1e-3, "x": 2e-3}),
        change(target={"1": 1e-3, "2": "2e-3"}),
        change(target={"1": 1e-3, "2": -1e-3}),
        change(target={"1": 1e-3, "2": float("nan")}),
        change(target={"1": 1e-3, "2": 1e9}),
        change(target={"1": 1e-3, "2": True}),
        change(target={"1": 0.0, "2": 1e-3}),
        change(passes=None),
        change(passes={"1": 1e-3, "2": 1e-4}),
        change(passes={"1": 0.0}),
        change(target={"0": 1e-4, "2": 1e-3}),
        change(target={"1": 1e-1, "2": 1e-3}),
        change(per_context_token=None),
        change(per_context_token=-1.0),
        change(draft={"eagle": [[1, 1, 1e-3]]}),
        change(draft={"ngram": [[1, 1, 1e-3], [2, 8, 1e-3]]}),
        change(draft={"ngram": [[0, 1, 1e-3]]}),
        change(draft={"ngram": [[1, 1]]}),
        change(draft={"ngram": []}),
        change(draft={"ngram": None}),
    ],
)
def test_what_is_damaged_foreign_or_implausible_is_ignored_with_one_line(
    damage: Callable[[str], str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = CostFile.of(CONDITIONS, tmp_path)
    file.save(FIGURES)
    file.path.write_text(damage(file.path.read_text()))
    with caplog.at_level(logging.INFO):
        assert file.load(["ngram"]) is None
    assert len(caplog.records) == 1 and str(file.path) in caplog.text
    file.save(FIGURES)
    assert file.load(["ngram"]) == FIGURES


def test_a_little_noise_is_no_damage(tmp_path: Path) -> None:
    figures = CostFigures({1: 1e-3, 2: 0.9e-3, 4: 2e-3}, 0.0, {})
    file = CostFile.of(CONDITIONS, tmp_path)
    file.save(figures)
    assert file.load([]) == figures


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    file = CostFile.of(CONDITIONS, tmp_path / "file" / "costs")
    with caplog.at_level(logging.INFO):
        file.save(FIGURES)
    assert "not kept" in caplog.text
    assert file.load(["ngram"]) is None
    taken = CostFile.of(CONDITIONS, tmp_path)
    taken.path.mkdir()
    taken.save(FIGURES)
    assert taken.load(["ngram"]) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["file", taken.path.name])


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert CostFile.of(CONDITIONS).path.is_relative_to(os.environ["FORETOKEN_CACHE"])
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FORETOKEN_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "foretoken"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/foretoken")
    monkeypatch.setenv("FORETOKEN_CACHE", "~/own")
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("FORETOKEN_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # a number that a container was given as its user
    assert cache_folder() == Path("/.cache/foretoken")


def test_what_decides_costs_is_in_the_key(tiny_target: Path, tiny_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_draft = (DraftModelConfig(str(tiny_draft)),)

    def key(target: Path = tiny_target, drafts: tuple[Any, ...] = own_draft, rows: int = 8, **settings: Any) -> str:
        config = EngineConfig(ModelConfig(str(target), **settings), CacheConfig(num_blocks=8), SchedulerConfig(64, rows))
        model = load_model(config.model, lambda line: None)
        return CostFile.of(conditions(config, SpeculativeConfig(drafts), model, ()), tmp_path).path.name

    def copy(folder: Path, name: str) -> Path:
        (tmp_path / name).mkdir()
        for file in folder.iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
            os.utime(tmp_path / name / file.name, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
        return tmp_path / name

    assert key(executor="torch") == key(executor="torch")
    keys = [
        key(executor="torch"), key(executor="transformers"), key(executor="torch", dtype="bfloat16"), key(executor="torch", rows=9),
        key(executor="torch", drafts=(DraftModelConfig(str(tiny_draft)), NgramConfig())),
        key(executor="torch", drafts=(DraftModelConfig(str(tiny_draft), 3),)),
    ]
    draft = copy(tiny_draft, "draft")
    keys.append(key(executor="torch", drafts=(DraftModelConfig(str(draft)),)))
    os.utime(draft / "model.safetensors", (1, 1))
    keys.append(key(executor="torch", drafts=(DraftModelConfig(str(draft)),)))
    target = copy(tiny_target, tiny_target.name)
    assert key(target, executor="torch") == keys[0], "moved elsewhere it is the same model"
    os.utime(target / "model.safetensors", (1, 1))
    keys.append(key(target, executor="torch"))
    monkeypatch.setattr("foretoken.kernels.native.sources", lambda: "compiled from something else")
    keys.append(key(executor="torch"))
    assert len(set(keys)) == len(keys)
