from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foretoken.kernels.fp8 import Fp8Matrix, quantised


def few(x: Tensor, values: Tensor) -> Tensor:
    return (x.float() @ values.float().t()).to(x.dtype)


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("extras", [False, True])
def test_products_are_near_those_of_the_whole_weights(rows: int, extras: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(48, 64, generator=generator) * torch.rand(48, 1, generator=generator) * 10).bfloat16()
    x = torch.randn(rows, 64, generator=generator).bfloat16()
    bias = torch.randn(48, generator=generator).bfloat16() if extras else None
    residual = torch.randn(rows, 48, generator=generator).bfloat16() if extras else None
    found = Fp8Matrix.of(weight).product(bias, few, most_few=8)(x, residual)
    expected = x.float() @ weight.float().t() + (0 if bias is None else bias.float()) + (0 if residual is None else residual.float())
    assert found.dtype == torch.bfloat16
    # e4m3 has 3 bits behind the point: an error of 2 ** -4 at most in each factor, and they average out
    assert (found.float() - expected).norm() / expected.norm() < (0.035 if rows <= 8 else 0.05)


def test_scales_fit_each_row() -> None:
    x = torch.tensor([[1e-6, -2e-6], [0.0, 0.0], [300.0, 1e4]])
    values, scales = quantised(x)
    assert values.float().isfinite().all()
    torch.testing.assert_close(values.float() * scales, x, rtol=0.07, atol=0)


def test_shapes_that_the_hardware_multiplies() -> None:
    assert Fp8Matrix.fits((64, 4096)) and not Fp8Matrix.fits((64, 100)) and not Fp8Matrix.fits((7, 64))
