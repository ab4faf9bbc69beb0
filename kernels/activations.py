"""The functions between two products, in torch: what a program's names of them mean. Knows no op."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .ops import CLAMPED, CLAMPED_LIMIT, CLAMPED_SLOPE

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "": lambda x: x,
}


def gated(function: str, gate: Tensor, up: Tensor) -> Tensor:
    """See ops.Activation. A gate of one column is for all of up."""
    if function == CLAMPED:
        gate = gate.clamp(max=CLAMPED_LIMIT)
        return gate * torch.sigmoid(CLAMPED_SLOPE * gate) * (up.clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT) + 1)
    return FUNCTIONS[function](gate) * up
