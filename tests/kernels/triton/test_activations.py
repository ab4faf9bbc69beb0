from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton_interpreter import DEVICE

from foretoken.kernels.activations import gated
from foretoken.kernels.ops import ACTIVATIONS, CLAMPED
from foretoken.kernels.triton.activations import activation, gated_activation

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu, "sigmoid": torch.sigmoid,
    "relu2": lambda x: F.relu(x).square(), "": lambda x: x,
}


@pytest.mark.parametrize("function", (*ACTIVATIONS, "", CLAMPED))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_torch(function: str, dtype: torch.dtype):
    packed = (4 * torch.randn(3, 2 * 1100, generator=torch.Generator().manual_seed(0))).to(dtype).to(DEVICE)
    packed[0, :4] = torch.tensor([-100.0, 100.0, 0.0, -0.0])
    gate, up = packed.chunk(2, -1)
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (1.6e-2, 1e-3)
    close = partial(torch.testing.assert_close, rtol=rtol, atol=atol)
    if function == CLAMPED:
        expected = gated(function, gate.double(), up.double()).to(dtype)
        close(gated_activation(packed, None, function), expected)
        return
    expected = FUNCTIONS[function](gate.double())
    close(activation(gate, function), expected.to(dtype))
    for out in (gated_activation(packed, None, function), gated_activation(gate, up, function)):
        close(out, (expected * up.double()).to(dtype))


def test_a_gate_of_one_column_is_for_all_of_them():
    generator = torch.Generator().manual_seed(0)
    packed, up = (torch.randn(3, width, generator=generator).to(DEVICE) for width in (7, 1100))
    gate = packed[:, 2:3]
    torch.testing.assert_close(gated_activation(gate, up, "sigmoid"), gate.sigmoid() * up)
    torch.testing.assert_close(gated_activation(gate, up[:, 4:5], "silu"), F.silu(gate) * up[:, 4:5])
