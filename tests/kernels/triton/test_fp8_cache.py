"""Keys and values as e4m3: rounded once when they are written, widened where they are read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_reference import attention_reference
from ragged_batches import BATCHES, NUM_BLOCKS, ragged
from torch import Tensor
from triton_interpreter import DEVICE

from foretoken.kernels.fp8 import FP8, LARGEST, nearest
from foretoken.kernels.layout import KVLayerSpec, RaggedBatch
from foretoken.kernels.program import RopeTable
from foretoken.kernels.rope_values import rope_table_values
from foretoken.kernels.torch_kv import TorchKV
from foretoken.kernels.triton.attention import ragged_paged_attention
from foretoken.kernels.triton.cache_write import rotate_and_store

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


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


def caches_of(batch: RaggedBatch, kv_heads: int, k_dim: int, v_dim: int, dtype: torch.dtype, generator: torch.Generator) -> list[TorchKV]:
    """[a wide cache, the same numbers as e4m3]"""
    layers = (KVLayerSpec(kv_heads, k_dim, v_dim),)
    wide, narrow = (TorchKV(layers, NUM_BLOCKS, batch.block_size, dtype, is_fp8=is_fp8) for is_fp8 in (False, True))
    slots = torch.arange(NUM_BLOCKS * batch.block_size)
    k, v = (torch.randn(len(slots), kv_heads, dim, generator=generator).to(dtype) for dim in (k_dim, v_dim))
    for kv in (wide, narrow):
        kv.write(0, slots, k, v)
    return [wide, narrow]


def attend(q: Tensor, kv: TorchKV, batch: RaggedBatch, *args: object, **kwargs: object) -> Tensor:
    tensors = {name: value.to(DEVICE) for name, value in vars(batch).items() if isinstance(value, Tensor)}
    k, v = kv.k[0].to(DEVICE), kv.v[0].to(DEVICE)
    return ragged_paged_attention(q.to(DEVICE), k, v, replace(batch, **tensors), *args, **kwargs).cpu()  # type: ignore[arg-type]


def check(
    name: str, heads: int = 4, kv_heads: int = 2, k_dim: int = 16, v_dim: int = 16, dtype: torch.dtype = torch.float32,
    window: int | None = None, softcap: float | None = None, split_places: int | None = None,
) -> None:  # fmt: skip
    """The same as the reference over what the narrow cache holds, and near what the wide one gives."""
    generator = torch.Generator().manual_seed(1)
    rows = BATCHES[name]
    batch = ragged(rows, generator, sum(causal + len(tree) for _, causal, tree in rows) + 2)
    wide, narrow = caches_of(batch, kv_heads, k_dim, v_dim, dtype, generator)
    q = torch.randn(len(batch.token_ids), heads, k_dim, generator=generator).to(dtype)
    found = attend(q, narrow, batch, 0.3, window, softcap, split_places)
    assert found.dtype == dtype
    expected = attention_reference(q, narrow, 0, batch, 0.3, window, softcap)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    whole = attention_reference(q, wide, 0, batch, 0.3, window, softcap)
    assert (found - whole).float().norm() <= 0.06 * whole.float().norm()  # a number is off by 1/16 at most, 1/38 on average


@pytest.mark.parametrize("name", ["decode", "chain", "tree", "tree without causal tokens", "empty rows", "equal decodes", "prefill"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, 5.0)])
def test_attention_reads_what_was_written(name: str, window: int | None, softcap: float | None):
    check(name, window=window, softcap=softcap)


@pytest.mark.parametrize(
    ("name", "window"), [pytest.param("mixed", None, marks=pytest.mark.slow), ("tree of 64", 30), ("later chunk", 50)]
)
def test_long_rows(name: str, window: int | None):
    check(name, window=window, dtype=torch.bfloat16)


@pytest.mark.parametrize(("heads", "kv_heads", "k_dim", "v_dim"), [(14, 2, 64, 64), (3, 1, 80, 80), (1, 1, 24, 40), (5, 5, 128, 128)])
def test_shapes_of_heads(heads: int, kv_heads: int, k_dim: int, v_dim: int):
    check("chain", heads, kv_heads, k_dim, v_dim, torch.bfloat16)


@pytest.mark.parametrize(
    ("dtype", "window", "softcap"), [pytest.param(torch.float32, None, None, marks=pytest.mark.slow), (torch.bfloat16, 70, 5.0)]
)
def test_contexts_cut_into_pieces(dtype: torch.dtype, window: int | None, softcap: float | None):
    check("mixed", dtype=dtype, window=window, softcap=softcap, split_places=64)


@pytest.mark.slow  # test_attention.py asks the same of the same kernel over a wide cache; what differs is the load
def test_bits_of_a_token_do_not_depend_on_the_batch():
    """At the end of a prompt, alone, and among others."""
    generator = torch.Generator().manual_seed(0)
    whole = ragged([(0, 80, []), (40, 1, [])], generator)
    _, kv = caches_of(whole, 2, 16, 16, torch.bfloat16, generator)
    q = torch.randn(81, 4, 16, generator=generator).bfloat16()
    wanted = attend(q, kv, whole, 0.3, split_places=64)[79]
    alone = ragged([(79, 1, [])], torch.Generator().manual_seed(9))
    alone = replace(alone, block_tables=whole.block_tables[:1])
    assert torch.equal(attend(q[79:80], kv, alone, 0.3, split_places=64)[0], wanted)
    among = ragged([(3, 1, []), (79, 1, [])], torch.Generator().manual_seed(9))
    tables = torch.zeros(2, whole.block_tables.shape[1], dtype=torch.int32)
    tables[0, : among.block_tables.shape[1]] = among.block_tables[0, : tables.shape[1]]
    tables[1] = whole.block_tables[0]
    both = torch.cat([q[:1], q[79:80]])
    assert torch.equal(attend(both, kv, replace(among, block_tables=tables), 0.3, split_places=64)[1], wanted)
