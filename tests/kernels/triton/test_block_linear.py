import pytest
import torch
from triton_interpreter import DEVICE

from foretoken.kernels.triton.block_linear import block_linear

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize(
    ("rows", "groups", "depth", "outputs"), [(0, 2, 8, 8), (1, 4, 16, 32), (3, 3, 70, 100), (17, 2, 64, 64), (70, 2, 130, 17)]
)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("is_fixed", [False, True])
def test_equals_torch(rows: int, groups: int, depth: int, outputs: int, dtype: torch.dtype, is_fixed: bool):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, groups * depth + 8, generator=generator).to(dtype)[:, : groups * depth]  # rows need not lie side by side
    weight = (torch.randn(groups * outputs, depth, generator=generator) / depth**0.5).to(dtype)
    found = block_linear(x.to(DEVICE), weight.to(DEVICE), groups, is_fixed)
    assert found.dtype == dtype
    blocks = zip(x.double().chunk(groups, 1), weight.double().chunk(groups), strict=True)
    wanted = torch.cat([columns @ block.T for columns, block in blocks], 1)
    torch.testing.assert_close(found.double().cpu(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_a_row_of_a_fixed_product_is_the_same_in_any_batch():
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(70, 3 * 100, generator=generator).to(DEVICE), torch.randn(3 * 40, 100, generator=generator).to(DEVICE)
    whole = block_linear(x, weight, 3, is_fixed=True)
    for start, end in [(0, 1), (1, 9), (60, 70)]:
        assert torch.equal(block_linear(x[start:end], weight, 3, is_fixed=True), whole[start:end])
