import pytest
import torch
from triton_interpreter import DEVICE

from foretoken.kernels.triton.rows import rows_of


@pytest.mark.parametrize(("count", "width"), [(1, 64), (5, 1100), (0, 8), (40, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_torch(count: int, width: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(count)
    matrix = torch.randn(12, width + 16, generator=generator).to(dtype).to(DEVICE)[:, :width]
    rows = torch.randint(12, (count,), generator=generator).to(DEVICE)
    assert torch.equal(rows_of(matrix, rows), matrix.index_select(0, rows))
    torch.testing.assert_close(rows_of(matrix, rows, 45.25), matrix.index_select(0, rows) * 45.25)
