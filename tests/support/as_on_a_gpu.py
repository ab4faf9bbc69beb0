"""Engines on a CPU that take the whole path of a GPU but for its graphs and kernels."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from torch import Tensor

from foretoken.engine import drafters
from foretoken.kernels import weights as weights_module
from foretoken.kernels.execution import Execution
from foretoken.kernels.graphs import GraphExecutor, Recorder
from foretoken.kernels.program import Program
from foretoken.kernels.torch_executor import TorchExecutor
from foretoken.kernels.weight_bank import WeightBank


def bind_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, recorder: Recorder | None = None) -> None:
    """Networks that are loaded from now on start and finish. recorder: of their graphs; None = no graphs."""

    def bind(program: Program, weights: Mapping[str, Tensor], execution: Execution, bank: WeightBank | None = None) -> GraphExecutor:
        return GraphExecutor(TorchExecutor(program, weights, execution.dtype, bank), recorder=recorder)

    monkeypatch.setattr(weights_module, "bind_program", bind)
    monkeypatch.setattr(drafters, "bind_program", bind)
