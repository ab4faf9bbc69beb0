from functools import partial

import pytest
import torch
from torch import Tensor
from triton_interpreter import DEVICE

from foretoken.kernels.program import RopeTable
from foretoken.kernels.rope_values import rope_table_values
from foretoken.kernels.triton.cache_write import rotate_and_store


def normed(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def rotated(x: Tensor, positions: Tensor, table: Tensor | None) -> Tensor:
    if table is None:
        return x
    cos, sin = table.double()[positions][:, None].chunk(2, -1)
    first, second, rest = x.split([cos.shape[-1], cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "k_dim", "v_dim", "num_rotated"),
    [(4, 2, 64, 64, 64), (3, 1, 80, 48, 80), (6, 6, 96, 96, 48), (9, 3, 128, 128, 128), (8, 8, 32, 16, 0), (0, 5, 24, 24, 12)],
)
@pytest.mark.parametrize(("with_norm", "norm_last"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_torch(
    heads: int, kv_heads: int, k_dim: int, v_dim: int, num_rotated: int, with_norm: bool, norm_last: bool, dtype: torch.dtype
):
    generator = torch.Generator().manual_seed(k_dim)
    tokens, slots = 5, 40
    widths = [heads * k_dim, kv_heads * k_dim, kv_heads * v_dim]
    packed = torch.randn(tokens, sum(widths), generator=generator).to(dtype).to(DEVICE)
    q, k, v = packed.split(widths, -1)
    q, k, v = q.view(tokens, heads, k_dim), k.view(tokens, kv_heads, k_dim), v.view(tokens, kv_heads, v_dim)
    slot_mapping = torch.tensor([7, -1, 39, 0, 12], device=DEVICE)
    positions = torch.tensor([0, 3, 100, 5, 17], device=DEVICE)
    frequencies = tuple(10000.0 ** -(i / max(num_rotated, 1)) for i in range(0, num_rotated, 2))
    table = rope_table_values(RopeTable(frequencies), 128, dtype, DEVICE) if num_rotated else None
    weights = torch.rand(2, k_dim, generator=generator).to(DEVICE) if with_norm else (None, None)
    k_cache, v_cache = (torch.full((slots, kv_heads, dim), 9.0, dtype=dtype, device=DEVICE) for dim in (k_dim, v_dim))
    out = rotate_and_store(
        q if heads else None, k, v, k_cache, v_cache, slot_mapping, positions, table, weights[0], weights[1], 1e-6, norm_last
    )

    def prepared(x: Tensor, weight: Tensor | None) -> Tensor:
        if norm_last:
            return normed(rotated(x.double(), positions, table), weight).to(dtype)
        return rotated(normed(x.double(), weight), positions, table).to(dtype)

    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (1.6e-2, 1e-2)
    close = partial(torch.testing.assert_close, rtol=rtol, atol=atol)
    if heads:
        assert out is not None
        close(out, prepared(q, weights[0]))
    else:
        assert out is None
    kept = slot_mapping >= 0
    wanted_k, wanted_v = (torch.full_like(cache, 9.0) for cache in (k_cache, v_cache))
    wanted_k[slot_mapping[kept]] = prepared(k, weights[1])[kept]
    wanted_v[slot_mapping[kept]] = v[kept]
    close(k_cache, wanted_k)
    assert torch.equal(v_cache, wanted_v)


@pytest.mark.parametrize("with_norm", [False, True])
def test_queries_alone(with_norm: bool):
    """As they are beside keys; nothing is written."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(3, 6, 48, generator=generator).to(DEVICE), torch.randn(3, 2, 48, generator=generator).to(DEVICE)
    slots, positions = torch.tensor([4, -1, 0], device=DEVICE), torch.tensor([9, 2, 30], device=DEVICE)
    table = rope_table_values(RopeTable((1.0, 0.1, 0.02, 0.003)), 64, torch.float32, DEVICE)
    weight = torch.rand(48, generator=generator).to(DEVICE) if with_norm else None
    cache = torch.full((6, 2, 48), 9.0, device=DEVICE)
    wanted = rotate_and_store(q, k, k, cache.clone(), cache.clone(), slots, positions, table, weight, weight, 1e-6)
    found = rotate_and_store(q, None, None, cache, cache, slots, positions, table, weight, None, 1e-6)
    assert wanted is not None and found is not None and torch.equal(found, wanted)
    assert (cache == 9).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_are_in_the_keys_are_written_once(dtype: torch.dtype):
    """The same as of a cache with values beside, which are nobody's here; what does not turn is as it was."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(3, 5, 40, generator=generator).to(DEVICE, dtype), torch.randn(3, 1, 40, generator=generator).to(DEVICE, dtype)
    slots, positions = torch.tensor([4, -1, 0], device=DEVICE), torch.tensor([9, 2, 30], device=DEVICE)
    table = rope_table_values(RopeTable((1.0, 0.1, 0.02, 0.003)), 64, dtype, DEVICE)
    beside, within = (torch.full((6, 1, 40), 9.0, dtype=dtype, device=DEVICE) for _ in range(2))
    wanted = rotate_and_store(q, k, k, beside, beside.clone(), slots, positions, table)
    found = rotate_and_store(q, k, None, within, within[..., 8:], slots, positions, table)
    assert wanted is not None and found is not None and torch.equal(found, wanted)
    assert torch.equal(within, beside) and torch.equal(within[slots[[0, 2]], :, 8:], k[[0, 2], :, 8:])
    assert (within[1:4] == 9).all()
