import itertools

import pytest
import torch
from triton_interpreter import DEVICE
from variants import slow_but

from foretoken.kernels.activations import gated
from foretoken.kernels.int4 import GROUP, TILE, Int4Matrix
from foretoken.kernels.ops import ACTIVATIONS, CLAMPED
from foretoken.kernels.triton.linear import Workspace
from foretoken.kernels.triton.linear_int4 import dequantised, fixed_int4_linear, int4_linear, skinny_int4_linear, wide_int4_linear

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def made(columns: int, depth: int, generator: torch.Generator) -> Int4Matrix:
    return Int4Matrix.of((torch.randn(columns, depth, generator=generator) / depth**0.5).to(DEVICE))


SHAPES = [(1, 1100, 40), (3, 200, 70), (17, 1100, 64), (40, 256, 100), (64, 31, 33)]  # rows, depth, columns
CASES = list(itertools.product(TOLERANCE, SHAPES))
QUICK = [(dtype, shape) for dtype, shape in CASES if dtype == torch.float32 or shape == (3, 200, 70)]


@pytest.mark.parametrize("case", slow_but(QUICK, CASES), ids=lambda case: f"{case[0]}-{'-'.join(map(str, case[1]))}")
def test_equals_the_reference(case: tuple[torch.dtype, tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    dtype, (rows, depth, columns) = case
    monkeypatch.setattr("foretoken.kernels.triton.linear_int4._SLICE", 7 * depth)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, depth + 8, generator=generator).to(dtype)[:, :depth].to(DEVICE)  # rows need not lie side by side
    weight = made(columns, depth, generator)
    bias, residual = (torch.randn(shape, generator=generator).to(dtype).to(DEVICE) for shape in [(columns,), (rows, columns)])
    workspace = Workspace(DEVICE)
    expected = x.double() @ weight.weight().double().T
    for with_bias, with_residual in [(None, None), (bias, residual)]:
        wanted = expected if with_bias is None else expected + with_bias.double()
        wanted = wanted if with_residual is None else wanted + with_residual.double()
        for out in (
            skinny_int4_linear(x, weight, workspace, with_bias, with_residual),
            fixed_int4_linear(x, weight, with_bias, with_residual),
            wide_int4_linear(x, weight, with_bias, with_residual),
        ):
            assert out.dtype == dtype
            torch.testing.assert_close(out.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert not workspace.arrived.any(), "the next launch would count wrongly"


@pytest.mark.parametrize(("rows", "depth", "half"), [(1, 1100, 40), (3, 200, 35), (17, 1100, 64), (64, 31, 5), (65, 64, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_gated_at_once_equals_the_reference(rows: int, depth: int, half: int, dtype: torch.dtype) -> None:
    """And what is gated behind a product of more rows."""
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, depth, generator=generator).to(DEVICE, dtype), made(2 * half, depth, generator)
    bias, workspace = torch.randn(2 * half, generator=generator).to(DEVICE, dtype), Workspace(DEVICE)
    sums = x.double() @ weight.weight().double().T + bias.double()
    out = int4_linear(x, weight, workspace, bias, None, "silu")
    assert out.dtype == dtype and out.shape == (rows, half)
    tolerance = 2 * TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), gated("silu", *sums.chunk(2, -1)), rtol=tolerance, atol=tolerance)
    assert not workspace.arrived.any(), "the next launch would count wrongly"


@pytest.mark.parametrize("function", (*ACTIVATIONS, "", CLAMPED))
def test_every_function_gates_at_once(function: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = 9 * torch.randn(3, 96, generator=generator).to(DEVICE), made(42, 96, generator)
    sums = x.double() @ weight.weight().double().T
    out = skinny_int4_linear(x, weight, Workspace(DEVICE), function=function)
    torch.testing.assert_close(out.double(), gated(function, *sums.chunk(2, -1)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [16, 32, 64])
def test_every_nibble_meets_every_group_scale_exactly(rows: int, dtype: torch.dtype) -> None:
    """On a GPU, where both are put together from bits. Each row of x picks one input, so what comes out are the weights."""
    depth, columns = 2 * TILE, 130
    column, place = torch.arange(columns)[:, None], torch.arange(depth)
    nibbles = (place + column) % 16
    group_scales = (column + 5 * (place // GROUP)) % 16 + 1
    halves, groups = torch.zeros(2, columns, GROUP, dtype=torch.int32), torch.zeros(2, columns, dtype=torch.int32)
    for group in range(depth // GROUP):
        tile, part = divmod(group, TILE // GROUP)
        halves[tile] |= nibbles[:, group * GROUP : (group + 1) * GROUP].int() << 4 * part
        groups[tile] |= group_scales[:, group * GROUP].int() << 8 * part
    words = halves.to(torch.int16).view(torch.int32)
    weight = Int4Matrix(words.to(DEVICE), groups.to(DEVICE), torch.ones(columns, device=DEVICE), depth)
    expected = ((nibbles - 8) * group_scales).T.to(DEVICE, dtype)
    assert torch.equal(weight.weight().T.to(dtype), expected)
    workspace = Workspace(DEVICE)
    for start in range(0, depth, rows):
        x = torch.eye(depth, dtype=dtype, device=DEVICE)[start : start + rows]
        assert torch.equal(skinny_int4_linear(x, weight, workspace), expected[start : start + rows])


@pytest.mark.parametrize(("columns", "depth"), [(70, 300), (128, 128), (5, 33)])
def test_whole_weights_are_those_of_the_reference(columns: int, depth: int) -> None:
    weight = made(columns, depth, torch.Generator().manual_seed(0))
    expected = weight.weight()
    for start, stop in [(0, columns), (3, columns), (1, 4)]:
        assert torch.equal(dequantised(weight, start, stop, torch.float32), expected[start:stop])
        narrow = dequantised(weight, start, stop, torch.bfloat16)
        torch.testing.assert_close(narrow.float(), expected[start:stop], rtol=2**-7, atol=0)  # the interpreter cuts digits off


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_a_fixed_product_is_the_same_in_any_batch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(70, 300, generator=generator).to(DEVICE, dtype), made(40, 300, generator)
    whole = fixed_int4_linear(x, weight)
    for start, end in [(0, 1), (3, 4), (1, 9), (60, 70)]:
        assert torch.equal(fixed_int4_linear(x[start:end], weight), whole[start:end])
