import pytest
import torch
from torch import Tensor

from foretoken.kernels.fp8 import Fp8Matrix, product_dtype, quantised


def few(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    out = (x.float() @ values.float().t()) * scales
    return sum((extra.float() for extra in (bias, residual) if extra is not None), out).to(x.dtype)


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("extras", [False, True])
def test_products_are_near_those_of_the_whole_weights(rows: int, extras: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(48, 64, generator=generator) * torch.rand(48, 1, generator=generator) * 10).bfloat16()
    x = torch.randn(rows, 64, generator=generator).bfloat16()
    bias = torch.randn(48, generator=generator).bfloat16() if extras else None
    residual = torch.randn(rows, 48, generator=generator).bfloat16() if extras else None
    found = Fp8Matrix.of(weight).product(bias, few, 8, quantised)(x, residual)
    expected = x.float() @ weight.float().t() + (0 if bias is None else bias.float()) + (0 if residual is None else residual.float())
    assert found.dtype == torch.bfloat16
    # e4m3 has 3 bits behind the point: an error of 2 ** -4 at most in each factor, and they average out
    assert (found.float() - expected).norm() / expected.norm() < (0.035 if rows <= 8 else 0.05)


def test_scales_fit_each_row() -> None:
    x = torch.tensor([[1e-6, -2e-6], [0.0, 0.0], [300.0, 1e4]])
    values, scales = quantised(x)
    assert values.float().isfinite().all()
    torch.testing.assert_close(values.float() * scales, x, rtol=0.07, atol=0)


def test_products_of_many_rows_come_out_in_what_every_gpu_has() -> None:
    """Whatever its CUDA is: Hopper's builds before CUDA 12.9 have no float32 under a scale for each row."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert product_dtype(dtype, torch.device("cuda")) == torch.bfloat16
        assert product_dtype(dtype, torch.device("cpu")) == dtype


@pytest.mark.parametrize("extras", [False, True])
def test_float32_products_where_only_bfloat16_comes_out(extras: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(48, 64, generator=generator), torch.randn(40, 64, generator=generator)
    bias, residual = torch.randn(48, generator=generator) if extras else None, torch.randn(40, 48, generator=generator) if extras else None
    product = Fp8Matrix.of(weight).product(bias, few, 8, quantised)
    expected = product(x, residual)
    monkeypatch.setattr("foretoken.kernels.fp8.product_dtype", lambda dtype, device: torch.bfloat16)
    found = product(x, residual)
    assert found.dtype == torch.float32 and not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=2**-8, atol=0.1)


def test_shapes_that_the_hardware_multiplies() -> None:
    assert Fp8Matrix.fits((64, 4096)) and not Fp8Matrix.fits((64, 100)) and not Fp8Matrix.fits((7, 64))
