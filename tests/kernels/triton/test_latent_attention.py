"""Attention over keys that hold their values: what such a cache adds to test_attention.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_reference import attention_reference
from ragged_batches import BATCHES, NUM_BLOCKS, ragged
from torch import Tensor
from triton_interpreter import DEVICE

from foretoken.kernels.layout import KVLayerSpec, RaggedBatch
from foretoken.kernels.torch_kv import TorchKV
from foretoken.kernels.triton import attention
from foretoken.kernels.triton.attention import ragged_paged_attention

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
RANK, TURNED = 32, 8


def cache(generator: torch.Generator, rank: int, turned: int, dtype: torch.dtype, is_fp8: bool = False) -> TorchKV:
    spec = KVLayerSpec(1, turned + rank, rank, values_in_keys=True)
    kv = TorchKV((spec,), NUM_BLOCKS, 4, dtype, is_fp8=is_fp8)
    k = torch.randn(kv.k[0].shape, generator=generator).to(dtype)
    kv.write(0, torch.arange(len(k)), k, k[..., turned:])
    return kv


def attend(q: Tensor, kv: TorchKV, batch: RaggedBatch, *args: object, **kwargs: object) -> Tensor:
    tensors = {name: value.to(DEVICE) for name, value in vars(batch).items() if isinstance(value, Tensor)}
    k = kv.k[0].to(DEVICE)
    v = k[..., -kv.v[0].shape[-1] :]
    return ragged_paged_attention(q.to(DEVICE), k, v, replace(batch, **tensors), *args, **kwargs).cpu()  # type: ignore[arg-type]


def check(
    name: str, heads: int = 4, rank: int = RANK, turned: int = TURNED, dtype: torch.dtype = torch.float32, is_fp8: bool = False,
    window: int | None = None, softcap: float | None = None, split_places: int | None = None,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    rows = BATCHES[name]
    batch = ragged(rows, generator, sum(causal + len(tree) for _, causal, tree in rows) + 2)
    kv = cache(generator, rank, turned, dtype, is_fp8)
    q = torch.randn(len(batch.token_ids), heads, turned + rank, generator=generator).to(dtype)
    found = attend(q, kv, batch, 0.2, window, softcap, split_places)
    expected = attention_reference(q, kv, 0, batch, 0.2, window, softcap)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["decode", "chain", "tree", "tree without causal tokens", "no rows", "empty rows", "prefill"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, 5.0)])
def test_equals_the_reference(name: str, window: int | None, softcap: float | None):
    check(name, window=window, softcap=softcap)


@pytest.mark.parametrize("split_places", [None, 64])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_long_rows(split_places: int | None, is_fp8: bool):
    check("mixed", dtype=torch.bfloat16, is_fp8=is_fp8, split_places=split_places)


@pytest.mark.parametrize(("rank", "turned"), [(512, 64), (256, 32), (160, 24), (48, 16)])
def test_widths(rank: int, turned: int):
    """What is joined is cut into columns where it is wide, the last ones of 160 are not all there."""
    check("chain", 3, rank, turned, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "is_fp8"), [(1, False), (20, False), (20, True), (96, False), (96, True)])
def test_groups_of_query_heads(heads: int, is_fp8: bool, dtype: torch.dtype):
    """More than a tile has rows: programs take equal parts."""
    check("tree", heads, dtype=dtype, is_fp8=is_fp8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [5, pytest.param(40, marks=pytest.mark.slow)])
def test_bits_do_not_depend_on_the_batch(heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """A token alone, among others and at the end of a prompt, whoever folds its pieces."""
    generator = torch.Generator().manual_seed(0)
    whole = ragged([(86, 4, [])], generator)
    kv = cache(generator, RANK, TURNED, dtype)
    q = torch.randn(4, heads, TURNED + RANK, generator=generator).to(dtype)
    wanted = attend(q, kv, whole, 0.2, split_places=64)[3]
    made = ragged([(3, 1, []), (89, 1, [])], torch.Generator().manual_seed(9))
    tables = torch.zeros(2, 60, dtype=torch.int32)
    tables[0, : made.block_tables.shape[1]], tables[1, : whole.block_tables.shape[1]] = made.block_tables[0], whole.block_tables[0]
    made = replace(made, block_tables=tables)
    of = attention._Tiles.latent
    for programs in (0, 10**6):
        monkeypatch.setattr(attention._Tiles, "latent", lambda *args, programs=programs: replace(of(*args), programs=programs))
        assert torch.equal(attend(q[[0, 3]], kv, made, 0.2, split_places=64)[1], wanted)


def test_nan_stays_in_its_row():
    generator = torch.Generator().manual_seed(0)
    batch = ragged([(30, 2, []), (30, 1, [-1, -1]), (70, 1, [])], generator, padded_to=9)
    kv = cache(generator, RANK, TURNED, torch.float16)
    q = torch.randn(9, 4, TURNED + RANK, generator=generator).half()
    clean = attend(q, kv, batch, 0.2)
    kv.k[0][batch.block_tables[1, 2] * 4 + 1] = torch.nan
    found = attend(q, kv, batch, 0.2)
    assert found[2:5].isnan().all()
    others = [0, 1, 5, 6, 7, 8]
    assert torch.equal(found[others], clean[others])


def test_a_single_row_keeps_a_gpu_busy(monkeypatch: pytest.MonkeyPatch):
    """With one head of keys, nothing but its places can be shared out."""
    grids: list[tuple[int, ...]] = []

    class Counting:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            grids.append(grid)
            return lambda *args, **kwargs: None

    for kernel in ("attend", "join"):
        monkeypatch.setattr(attention, kernel, Counting())
    batch = ragged([(2000, 1, [])], torch.Generator())
    batch = replace(batch, block_tables=torch.nn.functional.pad(batch.block_tables, (0, 2000)))
    for heads, parts in ((16, 1), (128, 2)):
        k = torch.empty(NUM_BLOCKS * 4, 1, 576, dtype=torch.bfloat16)
        ragged_paged_attention(k.new_empty(1, heads, 576), k, k[..., 64:], batch, 0.1)
        (tiles, programs, splits), _ = grids[-2:]
        assert programs == parts and tiles * programs * splits >= 128
