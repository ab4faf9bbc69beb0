"""Attention of blocks against one masked attention over everything."""

import pytest
import torch

from foretoken.proposers.training import block_attention
from foretoken.proposers.training.block_attention import Blocks
from foretoken.proposers.training.packing import Packed

BOUNDS = (0, 5, 6, 40)


def batch() -> Packed:
    return Packed(torch.arange(BOUNDS[-1]), torch.ones(BOUNDS[-1], dtype=torch.bool), BOUNDS)


def blocks(causal: bool) -> Blocks:
    return Blocks(batch(), torch.tensor([0, 3, 5, 8, 20, 20, 39]), torch.tensor([2, 4, 3, 1, 5, 2, 3]), causal)


def visible(blocks: Blocks) -> torch.Tensor:
    """[N + R, N + R] bool, slot by slot from what the docstring says."""
    size = BOUNDS[-1]
    document = torch.bucketize(torch.arange(size), torch.tensor(BOUNDS), right=True)
    seen = torch.zeros(size + len(blocks.numbers), size + len(blocks.numbers), dtype=torch.bool)
    seen[:size, :size] = (document[:, None] == document) & torch.ones(size, size, dtype=torch.bool).tril()
    slots = [(number, offset) for number, length in enumerate(blocks.lengths.tolist()) for offset in range(length)]
    for row, (number, offset) in enumerate(slots):
        place = int(blocks.places[number])
        for token in range(place):
            seen[size + row, token] = document[token] == document[place]
        for column, (other, before) in enumerate(slots):
            seen[size + row, size + column] = other == number and (before <= offset or not blocks.causal)
    return seen


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("slots", [3, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (2, 2)])
def test_attention_and_gradients(causal: bool, slots: int, heads: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_attention, "SLOTS", slots)
    torch.manual_seed(0)
    some = blocks(causal)
    count = BOUNDS[-1] + len(some.numbers)
    query, key, value = (
        torch.randn(1, number, count, 8, dtype=torch.double, requires_grad=True) for number in (heads, kv_heads, kv_heads))
    grad = torch.randn(1, count, heads, 8, dtype=torch.double)
    out, _ = block_attention.text_and_block_attention(torch.nn.Identity(), query, key, value, None, blocks=some)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, visible(some), enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    grads = torch.autograd.grad(out, (query, key, value), grad)
    for one, other in zip(grads, torch.autograd.grad(expected, (query, key, value), grad), strict=True):
        torch.testing.assert_close(one, other)


def test_slots_know_their_tokens() -> None:
    some = blocks(causal=True)
    assert some.numbers[:9].tolist() == [0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert some.offsets[:9].tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 2]
    assert some.positions[:10].tolist() == [0, 1, 3, 4, 5, 6, 0, 1, 2, 2]
    tokens, inside = some.ahead(1)                   # token ids are places here
    assert tokens[:4].tolist() == [1, 2, 4, 5]
    assert inside[:10].tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0, 1]
    assert some.ahead(0)[1][-3:].tolist() == [1, 0, 0]


def test_a_batch_may_have_none() -> None:
    none = Blocks(batch(), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), causal=True)
    query, key, value = (torch.randn(1, 2, BOUNDS[-1], 8, requires_grad=True) for _ in range(3))
    out, _ = block_attention.text_and_block_attention(torch.nn.Identity(), query, key, value, None, blocks=none)
    assert out.shape == (1, BOUNDS[-1], 2, 8) and len(none.ahead(1)[0]) == 0
    assert torch.isfinite(torch.autograd.grad(out.sum(), query)[0]).all()
