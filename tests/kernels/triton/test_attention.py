from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_reference import attention_reference
from ragged_batches import BATCHES, NUM_BLOCKS, ragged
from torch import Tensor
from triton_interpreter import DEVICE

from foretoken.kernels.layout import KVLayerSpec, RaggedBatch
from foretoken.kernels.torch_kv import TorchKV
from foretoken.kernels.triton import attention
from foretoken.kernels.triton.attention import LOG2_E, ragged_paged_attention

ALL = BATCHES | {"a few of each": [(40, 1, []), (3, 4, []), (17, 1, [-1, -1, 0]), (0, 1, [])]}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def cache(generator: torch.Generator, kv_heads: int, k_dim: int, v_dim: int, dtype: torch.dtype, block_size: int = 4) -> TorchKV:
    kv = TorchKV((KVLayerSpec(kv_heads, k_dim, v_dim),), NUM_BLOCKS, block_size, dtype)
    for tensor in (kv.k[0], kv.v[0]):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return kv


def attend(q: Tensor, kv: TorchKV, batch: RaggedBatch, *args: object, **kwargs: object) -> Tensor:
    tensors = {name: value.to(DEVICE) for name, value in vars(batch).items() if isinstance(value, Tensor)}
    k, v = kv.k[0].to(DEVICE), kv.v[0].to(DEVICE)
    return ragged_paged_attention(q.to(DEVICE), k, v, replace(batch, **tensors), *args, **kwargs).cpu()  # type: ignore[arg-type]


def check(
    rows: str | list[tuple[int, int, list[int]]],
    heads: int = 4,
    kv_heads: int = 2,
    k_dim: int = 16,
    v_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    padding: int = 2,
    window: int | None = None,
    softcap: float | None = None,
    block_size: int = 4,
    has_sinks: bool = False,
) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = ALL[rows] if isinstance(rows, str) else rows
    batch = ragged(rows, generator, sum(causal + len(tree) for _, causal, tree in rows) + padding, block_size=block_size)
    kv = cache(generator, kv_heads, k_dim, v_dim, dtype, block_size)
    q = torch.randn(len(batch.token_ids), heads, k_dim, generator=generator).to(dtype)
    sinks = 3 * torch.randn(heads, generator=generator) if has_sinks else None
    scaled = None if sinks is None else sinks.to(DEVICE) * LOG2_E
    out = attend(q, kv, batch, 0.3, window, softcap, sinks=scaled)
    expected = attention_reference(q, kv, 0, batch, 0.3, window, softcap, sinks)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


QUICK = ["decode", "chain", "tree", "tree without causal tokens", "no rows", "empty rows", "equal decodes", "prefill"]


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, 5.0)])
def test_equals_the_reference(name: str, window: int | None, softcap: float | None):
    check(name, window=window, softcap=softcap, has_sinks=softcap is not None)


@pytest.mark.parametrize(("name", "window"), [("mixed", None), ("mixed", 7), ("tree of 64", None), ("later chunk", 50)])
def test_long_rows(name: str, window: int | None):
    check(name, window=window, dtype=torch.float16, has_sinks=name == "later chunk")


@pytest.mark.parametrize(("k_dim", "v_dim"), [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (24, 40)])
def test_head_dimensions(k_dim: int, v_dim: int):
    check("a few of each", k_dim=k_dim, v_dim=v_dim, dtype=torch.bfloat16)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (8, 8), (14, 2), (20, 1)])
def test_groups_of_query_heads(heads: int, kv_heads: int):
    check("a few of each", heads, kv_heads, dtype=torch.float16)


@pytest.mark.parametrize("context", [14, 15, 16, 62, 63, 64])
def test_edges_of_blocks_and_tiles(context: int):
    check([(context, 1, []), (context, 2, [])], dtype=torch.float16, block_size=16)


def test_leading_places_without_entries_are_never_read():
    generator = torch.Generator().manual_seed(0)
    batch = ragged([(70, 1, []), (9, 3, [-1, 0]), (5, 1, [])], generator)
    batch = replace(batch, first_places=torch.tensor([66, 4, 0], dtype=torch.int32))
    kv = cache(generator, 2, 16, 16, torch.float16)
    q = torch.randn(len(batch.token_ids), 4, 16, generator=generator).half()
    expected = attention_reference(q, kv, 0, batch, 0.3)
    for row, place in [(0, 65), (0, 3), (1, 3), (1, 0)]:
        slot = batch.block_tables[row, place // 4] * 4 + place % 4
        kv.k[0][slot] = kv.v[0][slot] = torch.nan
    torch.testing.assert_close(attend(q, kv, batch, 0.3), expected, rtol=2e-3, atol=2e-3)


def test_nan_stays_in_its_row():
    generator = torch.Generator().manual_seed(0)
    batch = ragged([(30, 2, []), (30, 1, [-1, -1]), (70, 1, [])], generator, padded_to=9)
    kv = cache(generator, 2, 16, 16, torch.float16)
    q = torch.randn(9, 4, 16, generator=generator).half()
    clean = attend(q, kv, batch, 0.3)
    slot = batch.block_tables[1, 2] * 4 + 1
    kv.k[0][slot] = kv.v[0][slot] = torch.nan
    out = attend(q, kv, batch, 0.3)
    assert out[2:5].isnan().all()
    others = [0, 1, 5, 6, 7, 8]
    assert torch.equal(out[others], clean[others])


def test_padding_inside_rows_gets_zeros():
    generator = torch.Generator().manual_seed(0)
    batch = ragged([(30, 3, []), (8, 1, [])], generator)
    kv = cache(generator, 2, 16, 16, torch.float16)
    q = torch.randn(4, 4, 16, generator=generator).half()
    expected = attend(q, kv, batch, 0.3)
    expected[2] = 0
    batch.slot_mapping[2] = -1
    assert torch.equal(attend(q, kv, batch, 0.3), expected)


@pytest.mark.slow
def test_bits_of_a_token_do_not_depend_on_the_batch():
    """The same context alone, as the end of a prompt, of a chain and among other rows, with wider block tables."""
    generator = torch.Generator().manual_seed(0)
    kv = cache(generator, 2, 16, 16, torch.float16)
    q = torch.randn(160, 4, 16, generator=generator).half()
    whole = ragged([(0, 80, []), (40, 1, [])], generator)
    wanted = attend(q[:81], kv, whole, 0.3, split_places=64)
    torch.testing.assert_close(wanted, attention_reference(q[:81], kv, 0, whole, 0.3), rtol=2e-3, atol=2e-3)

    def later(first: int, end: int, *, width: int = 0, others: list[tuple[int, int, list[int]]] | None = None) -> Tensor:
        """Tokens first:end of the long row, whose context is in the cache."""
        batch = ragged([*(others or []), (first, end - first, [])], torch.Generator().manual_seed(9))
        start = len(batch.token_ids) - (end - first)
        tables = torch.zeros(len(batch.seq_lens), max(width, whole.block_tables.shape[1]), dtype=torch.int32)
        tables[:, : batch.block_tables.shape[1]] = batch.block_tables
        tables[-1, : whole.block_tables.shape[1]] = whole.block_tables[0]
        own = torch.cat([torch.randn(start, 4, 16, generator=generator).half(), q[first:end]])
        return attend(own, kv, replace(batch, block_tables=tables), 0.3, split_places=64)[start:]

    for first, end in [(79, 80), (63, 64), (62, 65), (66, 75)]:
        assert torch.equal(later(first, end), wanted[first:end])
    assert torch.equal(later(70, 73, width=50, others=[(3, 1, []), (20, 5, [])]), wanted[70:73])


@pytest.mark.parametrize(
    ("dtype", "window", "softcap"), [pytest.param(torch.float32, None, None, marks=pytest.mark.slow), (torch.bfloat16, 70, 5.0)]
)
def test_bits_do_not_depend_on_who_folds_the_pieces_or_how_many_there_may_be(
    dtype: torch.dtype, window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
):
    """One program that walks all, or many and a second launch, for some tokens at a time, with tables as wide as the model's."""
    generator = torch.Generator().manual_seed(0)
    batch = ragged([(150, 1, []), (0, 5, []), (70, 1, [-1, 0])], generator, 10)
    kv = cache(generator, 2, 16, 16, dtype)
    q = torch.randn(10, 4, 16, generator=generator).to(dtype)
    sinks = None if softcap is None else 3 * torch.randn(4, generator=generator)
    scaled = None if sinks is None else sinks.to(DEVICE) * LOG2_E
    wide = replace(batch, block_tables=torch.nn.functional.pad(batch.block_tables, (0, 50)))
    found: list[Tensor] = []
    for programs, scratch, made in [(10**6, 1 << 40, batch), (0, 0, wide), (10**6, 8_000, wide), (32, 1 << 40, wide)]:
        tiles = attention._Tiles(16, 32, 4, 2, programs)
        monkeypatch.setattr(attention._Tiles, "of", lambda *_, tiles=tiles: tiles)
        monkeypatch.setattr(attention, "SCRATCH_BYTES", scratch)
        found.append(attend(q, kv, made, 0.3, window, softcap, 64, scaled))
    expected = attention_reference(q, kv, 0, batch, 0.3, window, softcap, sinks)
    torch.testing.assert_close(found[0], expected, rtol=2e-2, atol=2e-2)
    assert all(torch.equal(other, found[0]) for other in found[1:])


@pytest.mark.parametrize("split_places", [None, 64])
def test_scratch_is_bounded(split_places: int | None, monkeypatch: pytest.MonkeyPatch):
    """What is said of it holds, and so does the result where it takes several launches."""
    generator = torch.Generator().manual_seed(0)
    batch = ragged([(150, 1, []), (3, 4, []), (50, 1, [-1])], generator, 8)
    kv = cache(generator, 2, 16, 16, torch.float32)
    q = torch.randn(8, 4, 16, generator=generator)
    whole = attend(q, kv, batch, 0.3, split_places=split_places)
    taken: list[int] = []
    empty = torch.empty

    def counting(*args: Any, **kwargs: Any) -> Tensor:
        made = empty(*args, **kwargs)
        taken.append(made.nbytes)
        return made

    places = 4 * batch.block_tables.shape[1]
    for most in (1 << 40, 6_000, 1):
        monkeypatch.setattr(attention, "SCRATCH_BYTES", most)
        taken.clear()
        with monkeypatch.context() as patched:
            patched.setattr(attention.torch, "empty", counting)
            found = attend(q, kv, batch, 0.3, split_places=split_places)
        if split_places is None:  # then there are fewer pieces
            torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(found, whole)
        pieces = 32 if split_places is None else -(-places // split_places)
        token = 4 * (4 * pieces * (16 + 1) + 2)  # float32 results and sums of 4 heads, and the token's span
        assert sum(taken) <= whole.nbytes + max(most, token), "the result and scratch"
        assert sum(taken) > whole.nbytes or (split_places is None and most == 1), "the test shows nothing"


def test_places_in_float8():
    """Half the cache: the numbers are widened on the way."""
    generator = torch.Generator().manual_seed(0)
    batch = ragged([(30, 2, []), (8, 1, [])], generator)
    kv = cache(generator, 2, 16, 16, torch.float16)
    narrow = [tensor.to(torch.float8_e4m3fn) for tensor in (kv.k[0], kv.v[0])]
    q = torch.randn(3, 4, 16, generator=generator).half()
    kv.k[0], kv.v[0] = (tensor.half() for tensor in narrow)
    expected = attend(q, kv, batch, 0.3)
    kv.k[0], kv.v[0] = narrow
    torch.testing.assert_close(attend(q, kv, batch, 0.3), expected, rtol=1e-3, atol=1e-3)
