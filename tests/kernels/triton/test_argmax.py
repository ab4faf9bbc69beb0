import math

import pytest
import torch
from triton_interpreter import DEVICE

from foretoken.kernels.triton.argmax import best_of_rows


@pytest.mark.parametrize("width", [1, 100, 2048, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_torch(width: int, dtype: torch.dtype):
    scores = torch.randn(6, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    scores[1] = scores[1].round()  # many equals
    scores[2, width // 2 :] = math.nan
    scores[3] = -math.inf
    scores[4, -1] = math.inf
    values, columns = best_of_rows(scores.to(DEVICE))
    wanted = scores.max(-1)
    torch.testing.assert_close(values.cpu(), wanted.values, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(columns.cpu(), wanted.indices)
