"""The training loop on a model of a few thousand weights: learning, exact resume, parts of a step, stopping, schedule, log."""

import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from foretoken.proposers.training.curves import append_row, read_rows
from foretoken.proposers.training.loop import Losses, Plan, Run
from foretoken.proposers.training.optimizer import Optimizer, OptimizerSettings, is_matrix
from foretoken.proposers.training.packing import Document, Packed, PackedStream, write
from foretoken.proposers.training.schedule import Schedule
from foretoken.proposers.training.target import Shape, TargetTrainee

SHAPE = Shape(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64)
PLAN = Plan(steps=12, accumulate=2, half=False, log_s=0.0, evaluate_s=0.0, optimizer=OptimizerSettings(lr=1e-2, table_lr=1e-2))


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> PackedStream:
    """Documents that count upwards from anywhere: easily learned."""
    chance = np.random.default_rng(0)
    documents = []
    for _ in range(300):
        start, length = chance.integers(0, 50), chance.integers(3, 30)
        ids = (np.arange(start, start + length) % 50).astype(np.uint32)
        documents.append(Document(ids, np.ones(length, np.uint8)))
    path = tmp_path_factory.mktemp("data") / "train"
    write(path, documents, 50)
    return PackedStream([path], 256)


def trainee() -> TargetTrainee:
    torch.manual_seed(0)
    return TargetTrainee(SHAPE.build(50))


def weights(run: Run) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in run.trainee.parameters()]


def test_training_lowers_the_loss_and_writes_log_and_curves(stream: PackedStream, tmp_path: Path) -> None:
    lines: list[str] = []
    run = Run(trainee(), stream, PLAN, tmp_path, held_out=[stream[len(stream) - 1]])
    assert run.train(lines.append)
    rows = read_rows(tmp_path / "log.csv")
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"]) - 0.5
    assert float(rows[-1]["held_out_accuracy"]) > float(rows[0]["held_out_accuracy"]) + 0.1
    assert len(rows) == len(lines) == 12 and "100%" in lines[-1]
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_a_killed_run_resumes_bit_for_bit(stream: PackedStream, tmp_path: Path) -> None:
    straight = Run(trainee(), stream, PLAN, tmp_path / "straight")
    straight.train(lambda line: None)

    for stop in (3, 7, None):
        run = Run(trainee(), stream, PLAN, tmp_path / "killed")

        def show(_: str, run: Run = run, stop: int | None = stop) -> None:
            if run.progress.step == stop:
                os.kill(os.getpid(), signal.SIGTERM)

        assert run.train(show) is (stop is None)
        if stop is None:
            assert run.progress.tokens == straight.progress.tokens
            for one, other in zip(weights(run), weights(straight), strict=True):
                assert torch.equal(one, other)


def test_a_step_is_the_same_on_one_thread_and_on_two(stream: PackedStream, tmp_path: Path) -> None:
    alone = Run(trainee(), stream, replace(PLAN, workers=1), tmp_path / "alone")
    side_by_side = Run(trainee(), stream, PLAN, tmp_path / "both")
    assert alone.step() == side_by_side.step()


def test_a_batch_has_the_same_gradients_whatever_runs_beside_it(stream: PackedStream, tmp_path: Path) -> None:
    """Else no two runs would end with the same weights, let alone one that was stopped in between."""

    class Twice(TargetTrainee):
        """Uses its weights for a second batch, too; `between` runs in the middle."""

        between: Callable[[], object] | None = None

        def loss(self, batch: Packed) -> Losses:
            first, between, self.between = super().loss(batch), self.between, None
            if between is not None:
                between()
            second = super().loss(stream[2])
            return replace(first, total=first.total + second.total)

    torch.manual_seed(0)
    model = Twice(SHAPE.build(50))
    run = Run(model, stream, replace(PLAN, half=True), tmp_path)
    alone = run.gradients(stream[0])
    with ThreadPoolExecutor(1) as another:
        model.between = lambda: another.submit(run.gradients, stream[1]).result()
        beside = run.gradients(stream[0])
    for one, other in zip(alone[1], beside[1], strict=True):
        assert one is not None and other is not None and torch.equal(one, other)


def test_minutes_end_a_run_before_its_steps(stream: PackedStream, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(trainee(), stream, replace(PLAN, steps=10_000, minutes=1 / 60), tmp_path)
    assert run.train(lambda line: None)
    assert 1 <= run.progress.step < 10_000 and run.progress.seconds < 5
    with caplog.at_level("INFO", "foretoken.train"):
        Run(trainee(), stream, run.plan, tmp_path)
    assert re.search(r"resumed at step \d+, 100% done", caplog.text)  # of steps that only the minutes limit there is no number to tell


def test_a_loss_that_is_not_finite_is_an_error(stream: PackedStream, tmp_path: Path) -> None:
    model = trainee()
    with torch.no_grad():
        next(model.parameters())[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="learning rate"):
        Run(model, stream, PLAN, tmp_path).train(lambda line: None)


def test_schedule_rises_stays_and_falls() -> None:
    schedule = Schedule(warmup=0.1, decay=0.5, floor=0.0)
    assert [round(schedule.factor(done), 2) for done in (0.0, 0.05, 0.1, 0.5, 0.75, 1.0)] == [0.01, 0.5, 1.0, 1.0, 0.5, 0.0]
    cosine = Schedule(warmup=0.0, decay=1.0, floor=0.1)
    assert cosine.factor(0.5) == pytest.approx(0.55) and cosine.factor(1.0) == pytest.approx(0.1)


def test_tables_heads_and_norms_are_not_matrices() -> None:
    named = dict(SHAPE.build(50).named_parameters())
    matrices = {name for name, parameter in named.items() if is_matrix(name, parameter)}
    assert "model.layers.0.self_attn.q_proj.weight" in matrices and "model.layers.1.mlp.down_proj.weight" in matrices
    assert not any("norm" in name or "embed" in name for name in matrices)
    optimizer = Optimizer(named.items(), OptimizerSettings(), workers=3)
    trained = [id(p) for each in optimizer.optimizers for group in each.param_groups for p in group["params"]]
    assert sorted(trained) == sorted(map(id, named.values()))


def test_a_new_column_joins_the_table(tmp_path: Path) -> None:
    table = tmp_path / "log.csv"
    for row in ({"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.4, "held_out_loss": 0.6}, {"step": 3, "loss": 0.3}):
        append_row(table, row)
    assert read_rows(table) == [
        {"step": "1", "loss": "0.5", "held_out_loss": ""}, {"step": "2", "loss": "0.4", "held_out_loss": "0.6"},
        {"step": "3", "loss": "0.3", "held_out_loss": ""}]
