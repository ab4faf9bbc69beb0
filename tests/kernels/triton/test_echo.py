"""Whether the host's memory is used in place is tried, and where it does not work nothing uses it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from triton_interpreter import DEVICE

from foretoken.kernels.host_memory import HostMemory, host_memory
from foretoken.kernels.triton import echo
from foretoken.kernels.triton.launcher import Launcher

AT = torch.device(DEVICE)


@pytest.fixture(autouse=True)
def launchers() -> Iterator[None]:
    yield
    Launcher.asks_triton = False


def test_it_works_here() -> None:
    assert echo.hears_its_echo(HostMemory(AT), AT) and not Launcher.asks_triton
    assert host_memory(AT) is host_memory(AT)


def test_another_echo_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    say = echo._say

    def wrong(device: torch.device, grid: tuple[int, ...], *args: Any) -> None:
        say(device, grid, *args[:-1], args[-1] + (args[-1] == 40))

    monkeypatch.setattr(echo, "_say", wrong)
    assert not echo.hears_its_echo(HostMemory(AT), AT) and Launcher.asks_triton


def test_a_driver_that_has_something_against_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refused(*args: Any) -> None:
        raise ValueError("Pointer argument (at 0) cannot be accessed")

    monkeypatch.setattr(echo, "_say", refused)
    assert not echo.hears_its_echo(HostMemory(AT), AT) and Launcher.asks_triton
    assert "Pointer argument (at 0)" in caplog.text
