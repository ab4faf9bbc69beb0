"""Launches that do not ask which build fits: each kind of arguments is asked for once, and no two kinds share a build."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from foretoken.kernels.triton.launcher import Launcher

GPU = torch.device("cuda", 0)


@dataclass
class Param:
    do_not_specialize: bool
    is_constexpr: bool = False


class FakeKernel:
    """Of Triton: launches are noted, builds launch themselves. Its second parameter is one that it builds for."""

    def __init__(self) -> None:
        self.params = [Param(False), Param(False), Param(True), Param(False, is_constexpr=True)]
        self.asked: list[Any] = []
        self.direct: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> Any:
            self.asked.append((grid, args, options))
            return Build(self, len(self.asked))

        return launch


class Build:
    def __init__(self, kernel: FakeKernel, number: int) -> None:
        self.kernel, self.number = kernel, number

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args: self.kernel.direct.append((self.number, grid, args))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return FakeKernel()


def test_a_kind_is_asked_for_once(kernel: FakeKernel) -> None:
    launch = Launcher(kernel, num_warps=2, LANES=32, BLOCKS=8)
    first, second = torch.zeros(4), torch.zeros(9)
    launch(GPU, (3,), first, None, 7)
    launch(GPU, (5, 2), second, None, 16)  # not built for
    assert kernel.asked == [((3,), (first, None, 7), {"LANES": 32, "BLOCKS": 8, "num_warps": 2})]
    assert kernel.direct == [(1, (5, 2, 1), (second, None, 16, 32, 8))]


def test_every_other_kind_is_asked_for(kernel: FakeKernel) -> None:
    launch = Launcher(kernel, num_warps=1, LANES=8)
    pool = torch.zeros(64)
    pointers = [(pool, 1, None), (pool[1:], 1, None), (pool.int(), 1, None), (pool, 1, pool), (pool, None, pool)]
    numbers = [(pool, 5, 5), (pool, 1 << 40, 5), (pool, 5, 1 << 40), (pool, 16, 5), (pool, 1, 5)]
    kinds = [*pointers, *numbers]
    for kind in kinds:
        launch(GPU, (1,), *kind)
    assert len(kernel.asked) == len(kinds) and not kernel.direct
    for number, kind in enumerate(kinds, 1):
        launch(GPU, (1,), *kind)
        assert kernel.direct[-1][0] == number
    for same in ((pool, 7, 16), (pool, 32, 1), (pool[4:], 5, 5)):
        launch(GPU, (1,), *same)
    assert len(kernel.asked) == len(kinds)


@pytest.mark.parametrize(("device", "asks"), [(torch.device("cpu"), False), (GPU, True)])
def test_elsewhere_triton_launches(kernel: FakeKernel, device: torch.device, asks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Launcher, "asks_triton", asks)
    launch = Launcher(kernel, num_warps=1)
    for _ in range(2):
        launch(device, (1,), torch.zeros(1))
    assert len(kernel.asked) == 2 and not kernel.direct
