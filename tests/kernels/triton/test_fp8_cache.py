"""Keys and values as e4m3: rounded once when they are written. test_attention.py reads them."""

import pytest
import torch
from torch import Tensor
from triton_interpreter import DEVICE

from foretoken.kernels.fp8 import FP8, LARGEST, nearest
from foretoken.kernels.program import RopeTable
from foretoken.kernels.rope_values import rope_table_values
from foretoken.kernels.triton.cache_write import rotate_and_store


def bits(x: Tensor) -> Tensor:
    return x.cpu().view(torch.uint8)


def written(k: Tensor, v: Tensor, slots: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    """The cache behind a write without norms and rotation; what nobody wrote is 1."""
    k_cache, v_cache = (torch.ones(num_slots, *x.shape[1:], device=DEVICE).to(FP8) for x in (k, v))
    slots = slots.to(DEVICE)
    assert rotate_and_store(None, k.to(DEVICE), v.to(DEVICE), k_cache, v_cache, slots, slots) is None
    return k_cache.cpu(), v_cache.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_number_becomes_the_nearest(dtype: torch.dtype):
    """All of e4m3, what lies between two of them, ties included, and what is beyond or no number."""
    codes = torch.arange(256, dtype=torch.uint8).view(FP8).double()
    steps = codes.sort().values[:-2]  # finite
    between = torch.cat([(steps[1:] * share + steps[:-1] * (1 - share)) for share in (0.25, 0.5, 0.75)])
    beyond = torch.tensor([449.0, -465.0, 480.0, 1e9, -1e30, torch.inf, -torch.inf, torch.nan, 2.0**-10, -(2.0**-11), 1e-30])
    numbers = torch.cat([codes, between, beyond]).to(dtype)
    numbers = torch.cat([numbers, numbers.new_zeros(-len(numbers) % 32)])
    k, v = numbers.view(-1, 2, 16), -numbers.view(-1, 2, 16)
    slots = torch.arange(len(k))
    for found, given in zip(written(k, v, slots, len(k)), (k, v), strict=True):
        is_nan = given.isnan()
        assert found.float()[is_nan].isnan().all()
        assert torch.equal(bits(found)[~is_nan], bits(nearest(given))[~is_nan])
        assert (found.float()[~is_nan].double() - given[~is_nan].double().clamp(-LARGEST, LARGEST)).abs().max() <= 16
        assert found.float()[~is_nan].abs().max() == LARGEST


def test_a_slot_of_minus_1_is_written_nowhere():
    k = torch.full((3, 5, 24), 2.0)
    found, _ = written(k, k, torch.tensor([4, -1, 0]), 6)
    assert [row.float().unique().tolist() for row in found] == [[2.0], [1.0], [1.0], [1.0], [2.0], [1.0]]


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "num_rotated"), [(4, 2, 64, 64), (3, 1, 80, 48), (9, 3, 128, 128)])
def test_what_is_normed_and_rotated_is_rounded_once(heads: int, kv_heads: int, dim: int, num_rotated: int):
    """The same launch over a float32 cache says what is to be rounded; q is not."""
    generator = torch.Generator().manual_seed(dim)
    q, k, v = (4 * torch.randn(5, n, dim, generator=generator).to(DEVICE) for n in (heads, kv_heads, kv_heads))
    slots, positions = torch.tensor([7, -1, 11, 0, 3], device=DEVICE), torch.tensor([0, 3, 100, 5, 17], device=DEVICE)
    table = rope_table_values(RopeTable(tuple(1e4 ** -(i / num_rotated) for i in range(0, num_rotated, 2))), 128, torch.float32, DEVICE)
    q_norm, k_norm = (2 * torch.rand(2, dim, generator=generator)).to(DEVICE)
    outs: list[Tensor] = []
    caches: list[tuple[Tensor, Tensor]] = []
    for dtype in (torch.float32, FP8):
        k_cache, v_cache = (torch.ones(12, kv_heads, dim, device=DEVICE).to(dtype) for _ in range(2))
        out = rotate_and_store(q, k, v, k_cache, v_cache, slots, positions, table, q_norm, k_norm, 1e-6)
        assert out is not None
        outs.append(out)
        caches.append((k_cache, v_cache))
    assert torch.equal(outs[0], outs[1])
    for wide, narrow in zip(*caches, strict=True):
        assert torch.equal(bits(narrow), bits(nearest(wide)))
