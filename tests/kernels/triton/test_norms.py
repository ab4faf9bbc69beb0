from functools import partial

import pytest
import torch
from triton_interpreter import DEVICE

from foretoken.kernels.triton.norms import rms_norm

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (3, 100), (2, 2048), (0, 8)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_equals_torch(tokens: int, width: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(width)
    wide = torch.randn(tokens, width + 16, generator=generator).to(dtype).to(DEVICE)
    x = wide[:, :width]
    weight, bias = torch.randn(2, width, generator=generator).to(DEVICE)

    def expected(of: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        y = of.double() / (of.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
        y = y if weight is None else y * weight
        return (y if bias is None else y + bias).to(dtype)

    close = partial(torch.testing.assert_close, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    close(rms_norm(x, None, 1e-5), expected(x, None, None))
    close(rms_norm(x, weight, 1e-5, bias), expected(x, weight, bias))
    close(rms_norm(x, weight, 1e-5, add_one=True), expected(x, weight + 1, None))
    shifted = x + 3
    close(rms_norm(shifted, weight, 1e-5, bias, centred=True), expected(shifted.double() - shifted.double().mean(-1, True), weight, bias))
