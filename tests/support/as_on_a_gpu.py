"""Engines on a CPU that take the whole path of a GPU but for its graphs and kernels, with networks here or on a device of their own."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from elsewhere import THERE, Elsewhere, Remote, here, there
from torch import Tensor

from foretoken.engine import drafters
from foretoken.engine.core import EngineCore
from foretoken.engine.request import TokenDelta
from foretoken.kernels import started
from foretoken.kernels import weights as weights_module
from foretoken.kernels.adapters import AdapterBank
from foretoken.kernels.execution import Execution
from foretoken.kernels.graphs import GraphExecutor, Recorder
from foretoken.kernels.program import Program
from foretoken.kernels.torch_executor import TorchExecutor
from foretoken.kernels.weight_bank import WeightBank


def bind_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, recorder: Callable[[], Recorder] | None = None) -> list[GraphExecutor]:
    """Networks that are loaded from now on, which are returned, start and finish. recorder: makes one for each; None = no graphs."""
    made: list[GraphExecutor] = []

    def bind(
        program: Program,
        weights: Mapping[str, Tensor],
        execution: Execution,
        bank: WeightBank | None = None,
        adapters: AdapterBank | None = None,
    ) -> GraphExecutor:
        plain = TorchExecutor(program, weights, execution.dtype, bank, adapters=adapters)
        made.append(GraphExecutor(plain, recorder=recorder and recorder()))
        return made[-1]

    for module in (weights_module, drafters):
        monkeypatch.setattr(module, "bind_program", bind)
    return made


@contextmanager
def engines_elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[Elsewhere]:
    """The same with networks that are not where the host is: what would mix devices fails the step that it is in. Engines are made
    within; they step on threads of their own."""
    device = Elsewhere()
    make, match, step = torch.tensor, started.match, EngineCore.step

    def bind(
        program: Program,
        weights: Mapping[str, Tensor],
        execution: Execution,
        bank: WeightBank | None = None,
        adapters: AdapterBank | None = None,
    ) -> GraphExecutor:
        moved = {name: weight if isinstance(weight, Remote) else there(weight) for name, weight in weights.items()}
        if adapters is not None:
            for names, factors in adapters.factors.items():
                adapters.factors[names] = replace(factors, down=there(factors.down), ups=tuple(there(up) for up in factors.ups))
        return GraphExecutor(TorchExecutor(program, moved, execution.dtype, bank, THERE, adapters=adapters))

    def tensor(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        """The one way to make a tensor that no mode is asked about."""
        made = make(*args, **kwargs)
        return there(made) if device is not None and torch.device(device) == THERE else made

    def match_there(argmax: Tensor, top: Tensor, chosen: Tensor | None, guesses: started.Guesses) -> Tensor:
        """What a kernel does; its reference needs numbers."""
        return there(match(here(argmax), here(top), None if chosen is None else here(chosen), guesses))

    def step_within(core: EngineCore, now: float) -> list[TokenDelta]:
        with device:
            return step(core, now)

    for module in (weights_module, drafters):
        monkeypatch.setattr(module, "bind_program", bind)
    monkeypatch.setattr(torch, "tensor", tensor)
    monkeypatch.setattr(torch, "inference_mode", lambda mode=True: torch.no_grad())  # which a tensor of another class cannot be made in
    monkeypatch.setattr(started, "match", match_there)
    monkeypatch.setattr(EngineCore, "step", step_within)
    with device:
        yield device
