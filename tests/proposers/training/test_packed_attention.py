"""Packed attention against attention of each document by itself."""

import pytest
import torch

from foretoken.proposers.training import packed_attention
from foretoken.proposers.training.packed_attention import BLOCK


@pytest.mark.parametrize("bounds", [(0, 5), (0, 1, 3, 40), (0, BLOCK + 7, 2 * BLOCK + 30)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (2, 2)])
def test_attention_and_gradients(bounds: tuple[int, ...], heads: int, kv_heads: int) -> None:
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(1, count, bounds[-1], 8, dtype=torch.double, requires_grad=True) for count in (heads, kv_heads, kv_heads))
    grad = torch.randn(1, bounds[-1], heads, 8, dtype=torch.double)

    out, _ = packed_attention.packed_attention(torch.nn.Identity(), query, key, value, None, bounds=bounds)
    grads = torch.autograd.grad(out, (query, key, value), grad)
    rows = [
        torch.nn.functional.scaled_dot_product_attention(
            query[:, :, start:end], key[:, :, start:end], value[:, :, start:end], is_causal=True, enable_gqa=True)
        for start, end in zip(bounds, bounds[1:], strict=False)
    ]
    expected = torch.cat(rows, 2).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    for one, other in zip(grads, torch.autograd.grad(expected, (query, key, value), grad), strict=True):
        torch.testing.assert_close(one, other)
