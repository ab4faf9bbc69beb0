"""When kernels are launched early: only where that was tried, gave the same bits every time, and was faster. What they do needs a GPU."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_graphs import FakeRecorder
from small_networks import small_network

from foretoken.kernels import launch_trial
from foretoken.kernels.graphs import GraphExecutor
from foretoken.kernels.launch_trial import PASSES, TURNS, Trial, try_early_launches

early_launch = pytest.importorskip("foretoken.kernels.triton.early_launch")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(launch_trial, "_can_launch_early", lambda device: True)
    yield
    early_launch.launching_early.clear()


def is_early() -> bool:
    return bool(early_launch.launch_options(CPU)["EARLY"])


def timed(usual: float, early: float) -> Callable[[Callable[[], object]], float]:
    """By turns, the usual one first."""
    turns = iter([usual, early] * TURNS + [usual])
    return lambda work: next(turns)


class Spoiled(FakeRecorder):
    """Early passes give another result from one on, or cannot be recorded."""

    def __init__(self, first: int | None) -> None:
        super().__init__()
        self.first = first

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        replay, result = super().record(work)
        if not is_early():
            return replay, result
        if self.first is None:
            raise RuntimeError("no such attribute")
        count = 0

        def spoiled() -> None:
            nonlocal count
            replay()
            count += 1
            if count == self.first:
                result[0, 5] += 1e-6

        return spoiled, result


def test_early_where_it_is_faster() -> None:
    recorder = FakeRecorder()
    trial = try_early_launches(small_network(), recorder.record, timed(4.4, 3.9))
    assert is_early() and early_launch.launch_options(CPU)["launch_pdl"]
    assert trial is not None and trial == Trial(4.4, 3.9) and trial.describe() == "early: a pass takes 3.90 instead of 4.40 ms"
    assert recorder.num_replays == 1 + TURNS * PASSES


def test_as_usual_where_it_is_not() -> None:
    trial = try_early_launches(small_network(), FakeRecorder().record, timed(4.4, 4.4))
    assert not is_early() and early_launch.launch_options(CPU) == {"EARLY": False}
    assert trial and trial.describe() == "one by one: a pass takes 4.40 ms, with early ones 4.40"


@pytest.mark.parametrize("first", [1, TURNS * PASSES, None])
def test_as_usual_where_bits_differ_once_or_it_cannot_be_done(first: int | None) -> None:
    trial = try_early_launches(small_network(), Spoiled(first).record, timed(4.4, 3.9))
    assert not is_early() and trial and trial.problem
    assert trial.describe() == f"one by one: {'early ones gave another result' if first else 'RuntimeError: no such attribute'}"


def test_the_pass_that_is_tried_reads_its_context_and_writes_its_own_place() -> None:
    kept: list[torch.Tensor] = []

    def record(work: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        replay, result = FakeRecorder().record(work)
        kept.append(result.clone())
        return replay, result

    network = small_network(max_position_embeddings=512)
    try_early_launches(network, record, timed(1, 1))
    assert kept[0].shape == (1, network.vocab_size) and kept[0].std() > 0 and torch.equal(kept[0], kept[1])


def test_nothing_is_tried_where_there_is_nothing_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = GraphExecutor(small_network(), recorder=FakeRecorder())
    executor.capture(executor.allocate(32, 4), (), most_rows=2)
    assert executor.launches is None
    monkeypatch.undo()
    assert try_early_launches(small_network(), FakeRecorder().record) is None and not is_early()
