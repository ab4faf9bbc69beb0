"""Attention of an unrolled draft layer against what each chain sees, written out."""

import pytest
import torch
from torch import Tensor, nn

from foretoken.proposers.training import unrolled_attention
from foretoken.proposers.training.unrolled_attention import Unroll

BOUNDS = (0, 5, 6, 14, 17)
STARTS = (1, 3, 4, 7, 8, 11, 12, 13)     # of no chain at all in two of the documents
KV_HEADS, DIM, STEPS = 2, 8, 4


def _random(heads: int) -> list[list[Tensor]]:
    torch.manual_seed(0)
    counts = [BOUNDS[-1], *[len(STARTS)] * (STEPS - 1)]
    return [
        [torch.randn(1, number, count, DIM, dtype=torch.double, requires_grad=True) for count in counts]
        for number in (heads, KV_HEADS, KV_HEADS)
    ]


def _reference(queries: list[Tensor], keys: list[Tensor], values: list[Tensor]) -> list[Tensor]:
    found: list[Tensor] = []
    for step, q in enumerate(queries):
        rows: list[Tensor] = []
        for row, token in enumerate(STARTS if step else range(BOUNDS[-1])):
            first = max(bound for bound in BOUNDS if bound <= token)
            seen = [(0, other) for other in range(first, token + 1)] + [(later, row) for later in range(1, step + 1)]
            k, v = (torch.stack([x[s][0, :, t] for s, t in seen], 1).repeat_interleave(q.shape[1] // 2, 0) for x in (keys, values))
            rows.append((q[0, :, row, None] @ k.transpose(1, 2) / DIM**0.5).softmax(-1) @ v)
        found.append(torch.cat(rows, 1).transpose(0, 1))
    return found


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("block", [3, 256])
def test_attention_and_gradients(block: int, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unrolled_attention, "BLOCK", block)
    queries, keys, values = _random(heads)
    unroll = Unroll(BOUNDS, torch.tensor(STARTS))
    found = [
        unrolled_attention.unrolled_attention(nn.Module(), q, k, v, None, unroll=unroll)[0][0]
        for q, k, v in zip(queries, keys, values, strict=True)
    ]
    expected, inputs = _reference(queries, keys, values), [*queries, *keys, *values]
    weights = [torch.randn_like(part) for part in expected]
    grads, wanted = (torch.autograd.grad(parts, inputs, weights) for parts in (found, expected))
    for one, other in zip([*found, *grads], [*expected, *wanted], strict=True):
        torch.testing.assert_close(one, other)


def test_no_chains_at_all() -> None:
    unroll = Unroll(BOUNDS, torch.tensor([], dtype=torch.int64))
    for count in (BOUNDS[-1], 0, 0):
        query, key, value = (torch.randn(1, heads, count, DIM, requires_grad=True) for heads in (4, KV_HEADS, KV_HEADS))
        out, _ = unrolled_attention.unrolled_attention(nn.Module(), query, key, value, None, unroll=unroll)
        assert out.shape == (1, count, 4, DIM)
        out.sum().backward()
