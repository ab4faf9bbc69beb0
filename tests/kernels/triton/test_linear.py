import pytest
import torch
from triton_interpreter import DEVICE

from foretoken.kernels.activations import gated
from foretoken.kernels.ops import ACTIVATIONS, CLAMPED
from foretoken.kernels.triton.linear import Workspace, fixed_linear, skinny_linear

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize(("rows", "depth", "columns"), [(1, 1024, 40), (3, 1100, 32), (16, 600, 100), (17, 1664, 64), (32, 64, 33)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_equals_torch(rows: int, depth: int, columns: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, depth + 8, generator=generator).to(dtype)[:, :depth].to(DEVICE)  # rows need not lie side by side
    weight = (torch.randn(columns, depth, generator=generator) / depth**0.5).to(dtype).to(DEVICE)
    bias, residual = (torch.randn(shape, generator=generator).to(dtype).to(DEVICE) for shape in [(columns,), (rows, columns)])
    workspace = Workspace(DEVICE)
    expected = x.double() @ weight.double().T
    for with_bias, with_residual in [(None, None), (bias, None), (bias, residual)]:
        wanted = expected if with_bias is None else expected + with_bias.double()
        wanted = wanted if with_residual is None else wanted + with_residual.double()
        for out in (
            skinny_linear(x, weight, workspace, with_bias, with_residual),
            fixed_linear(x, weight, with_bias, with_residual),
        ):
            assert out.dtype == dtype
            torch.testing.assert_close(out.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert not workspace.arrived.any(), "the next launch would count wrongly"


def test_float8_weights():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 512, generator=generator).half().to(DEVICE)
    weight = torch.randn(48, 512, generator=generator).to(torch.float8_e4m3fn).to(DEVICE)
    scales, residual = torch.rand(48, generator=generator).to(DEVICE), torch.ones(3, 48).half().to(DEVICE)
    out = skinny_linear(x, weight, Workspace(DEVICE), None, residual, scales)
    expected = x.double() @ (weight.double() * scales[:, None].double()).T + 1
    torch.testing.assert_close(out.double(), expected, rtol=4e-3, atol=4e-2)


@pytest.mark.parametrize(("rows", "depth", "half"), [(1, 1100, 37), (3, 1664, 48), (17, 64, 5), (32, 2100, 16)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_what_is_gated_at_once_equals_torch(rows: int, depth: int, half: int, dtype: torch.dtype):
    """Of sums in one piece and in several, in whole blocks and in others."""
    x, weight = gate_up(rows, depth, half, dtype)
    bias, workspace = torch.randn(2 * half, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype), Workspace(DEVICE)
    for with_bias in (None, bias):
        sums = x.double() @ weight.double().T + (0 if with_bias is None else with_bias.double())
        out = skinny_linear(x, weight, workspace, with_bias, function="silu")
        assert out.dtype == dtype and out.shape == (rows, half)
        torch.testing.assert_close(out.double(), gated("silu", *sums.chunk(2, -1)), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert not workspace.arrived.any(), "the next launch would count wrongly"


@pytest.mark.parametrize("function", (*ACTIVATIONS, "", CLAMPED))
def test_every_function_gates_at_once(function: str):
    x, weight = gate_up(3, 96, 21, torch.float32)
    sums = 9 * x.double() @ weight.double().T  # some are clamped
    out = skinny_linear(9 * x, weight, Workspace(DEVICE), function=function)
    torch.testing.assert_close(out.double(), gated(function, *sums.chunk(2, -1)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "depth", "half"), [(1, 512, 48), (20, 1100, 37)])
def test_what_8_bit_weights_make_is_scaled_before_it_is_gated(rows: int, depth: int, half: int, dtype: torch.dtype):
    x, weight = gate_up(rows, depth, half, dtype)
    weight = (8 * weight).to(torch.float8_e4m3fn)
    generator = torch.Generator().manual_seed(1)
    scales, bias = torch.rand(2 * half, generator=generator).to(DEVICE), torch.randn(2 * half, generator=generator).to(DEVICE, dtype)
    sums = x.double() @ (weight.double() * scales[:, None].double()).T + bias.double()
    out = skinny_linear(x, weight, Workspace(DEVICE), bias, None, scales, "silu")
    torch.testing.assert_close(out.double(), gated("silu", *sums.chunk(2, -1)), rtol=TOLERANCE[dtype], atol=3 * TOLERANCE[dtype])


def gate_up(rows: int, depth: int, half: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and the weights [2 * half, depth] of gates and ups."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, depth, generator=generator).to(DEVICE, dtype)
    return x, (torch.randn(2 * half, depth, generator=generator) / depth**0.5).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [16, 32])
def test_every_float8_number_is_widened_exactly(rows: int, dtype: torch.dtype):
    """Each row of x picks one input, so what comes out are the weights."""
    codes = torch.arange(256)[[code & 127 != 127 for code in range(256)]].to(torch.uint8)  # all but NaN
    weight = torch.stack([codes.roll(by) for by in range(70)]).view(torch.float8_e4m3fn).to(DEVICE)
    scales, workspace = torch.ones(70, device=DEVICE), Workspace(DEVICE)
    for start in range(0, len(codes), rows):
        x = torch.eye(len(codes), dtype=dtype, device=DEVICE)[start : start + rows]
        assert torch.equal(skinny_linear(x, weight, workspace, scales=scales), weight.to(dtype).T[start : start + rows])


def test_a_row_of_a_fixed_product_is_the_same_in_any_batch():
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(70, 300, generator=generator).to(DEVICE), torch.randn(40, 300, generator=generator).to(DEVICE)
    whole = fixed_linear(x, weight)
    for start, end in [(0, 1), (3, 4), (1, 9), (60, 70)]:
        assert torch.equal(fixed_linear(x[start:end], weight), whole[start:end])
