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


# What lies in the cache: as it is, as e4m3, or keys that hold their values.
CACHES: dict[str, dict[str, Any]] = {
    "wide": {},
    "fp8": {"is_fp8": True},
    "latent": {"kv_heads": 1, "k_dim": 40, "v_dim": 32, "values_in_keys": True},
}


def cache(
    generator: torch.Generator,
    kv_heads: int,
    k_dim: int,
    v_dim: int,
    dtype: torch.dtype,
    block_size: int = 4,
    is_fp8: bool = False,
    values_in_keys: bool = False,
) -> TorchKV:
    layers = (KVLayerSpec(kv_heads, k_dim, v_dim, values_in_keys=values_in_keys),)
    kv = TorchKV(layers, NUM_BLOCKS, block_size, dtype, is_fp8=is_fp8)
    slots = torch.arange(NUM_BLOCKS * block_size)
    k, v = (torch.randn(len(slots), kv_heads, dim, generator=generator).to(dtype) for dim in (k_dim, v_dim))
    kv.write(0, slots, k, k[..., -v_dim:] if values_in_keys else v)
    return kv


def attend(q: Tensor, kv: TorchKV, batch: RaggedBatch, *args: object, **kwargs: object) -> Tensor:
    tensors = {name: value.to(DEVICE) for name, value in vars(batch).items() if isinstance(value, Tensor)}
    k = kv.k[0].to(DEVICE)
    v = kv.v[0].to(DEVICE) if kv.v[0].is_contiguous() else k[..., -kv.v[0].shape[-1] :]  # else it is a part of the keys
    return ragged_paged_attention(q.to(DEVICE), k, v, replace(batch, **tensors), *args, **kwargs).cpu()  # type: ignore[arg-type]


def check(
    rows: str | list[tuple[int, int, list[int]]],
    heads: int = 4,
    kv_heads: int = 2,
    k_dim: int = 16,
    v_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    softcap: float | None = None,
    block_size: int = 4,
    has_sinks: bool = False,
    is_fp8: bool = False,
    values_in_keys: bool = False,
    split_places: int | None = None,
) -> None:
    """The same as the reference over what the cache holds, and near what it gives over one that rounds nothing."""
    generator = torch.Generator().manual_seed(1)
    rows = ALL[rows] if isinstance(rows, str) else rows
    batch = ragged(rows, generator, sum(causal + len(tree) for _, causal, tree in rows) + 2, block_size=block_size)
    wide, kv = (
        cache(torch.Generator().manual_seed(2), kv_heads, k_dim, v_dim, dtype, block_size, is_narrow, values_in_keys)
        for is_narrow in (False, is_fp8)
    )
    q = torch.randn(len(batch.token_ids), heads, k_dim, generator=generator).to(dtype)
    sinks = 3 * torch.randn(heads, generator=generator) if has_sinks else None
    scaled = None if sinks is None else sinks.to(DEVICE) * LOG2_E
    out = attend(q, kv, batch, 0.3, window, softcap, split_places, scaled)
    expected = attention_reference(q, kv, 0, batch, 0.3, window, softcap, sinks)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    if is_fp8 and not values_in_keys:
        whole = attention_reference(q, wide, 0, batch, 0.3, window, softcap, sinks)
        assert (out - whole).float().norm() <= 0.06 * whole.float().norm()  # a number is off by 1/16 at most, 1/38 on average


QUICK = ["decode", "chain", "tree", "tree without causal tokens", "no rows", "empty rows", "equal decodes", "prefill"]


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, 5.0)])
@pytest.mark.parametrize("kind", CACHES)
def test_equals_the_reference(kind: str, name: str, window: int | None, softcap: float | None):
    check(name, window=window, softcap=softcap, has_sinks=softcap is not None, **CACHES[kind])


@pytest.mark.parametrize(
    ("kind", "name", "window", "dtype"),
    [
        ("wide", "mixed", None, torch.float16),
        ("wide", "mixed", 7, torch.float16),
        ("wide", "tree of 64", None, torch.float16),
        ("wide", "later chunk", 50, torch.float16),
        pytest.param("fp8", "mixed", None, torch.bfloat16, marks=pytest.mark.slow),
        ("fp8", "tree of 64", 30, torch.bfloat16),
        ("fp8", "later chunk", 50, torch.bfloat16),
    ],
)
def test_long_rows(kind: str, name: str, window: int | None, dtype: torch.dtype):
    check(name, window=window, dtype=dtype, has_sinks=name == "later chunk", **CACHES[kind])


@pytest.mark.parametrize("split_places", [None, 64])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_long_rows_of_keys_that_hold_their_values(split_places: int | None, is_fp8: bool):
    check("mixed", dtype=torch.bfloat16, split_places=split_places, **CACHES["latent"] | {"is_fp8": is_fp8})


@pytest.mark.parametrize(
    ("dtype", "window", "softcap"), [pytest.param(torch.float32, None, None, marks=pytest.mark.slow), (torch.bfloat16, 70, 5.0)]
)
def test_contexts_of_e4m3_cut_into_pieces(dtype: torch.dtype, window: int | None, softcap: float | None):
    check("mixed", dtype=dtype, window=window, softcap=softcap, split_places=64, is_fp8=True)


@pytest.mark.parametrize(("k_dim", "v_dim"), [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (24, 40)])
def test_head_dimensions(k_dim: int, v_dim: int):
    check("a few of each", k_dim=k_dim, v_dim=v_dim, dtype=torch.bfloat16)


@pytest.mark.parametrize(("heads", "kv_heads", "k_dim", "v_dim"), [(14, 2, 64, 64), (3, 1, 80, 80), (1, 1, 24, 40), (5, 5, 128, 128)])
def test_shapes_of_heads_in_e4m3(heads: int, kv_heads: int, k_dim: int, v_dim: int):
    check("chain", heads, kv_heads, k_dim, v_dim, torch.bfloat16, is_fp8=True)


@pytest.mark.parametrize(("rank", "turned"), [(512, 64), (256, 32), (160, 24), (48, 16)])
def test_widths_of_keys_that_hold_their_values(rank: int, turned: int):
    """What is joined is cut into columns where it is wide, the last ones of 160 are not all there."""
    check("chain", 3, 1, turned + rank, rank, torch.bfloat16, values_in_keys=True)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (8, 8), (14, 2), (20, 1)])
def test_groups_of_query_heads(heads: int, kv_heads: int):
    check("a few of each", heads, kv_heads, dtype=torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "is_fp8"), [(1, False), (20, False), (20, True), (96, False), (96, True)])
def test_groups_of_one_head_that_holds_its_values(heads: int, is_fp8: bool, dtype: torch.dtype):
    """More than a tile has rows: programs take equal parts."""
    check("tree", heads, dtype=dtype, **CACHES["latent"] | {"is_fp8": is_fp8})


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


@pytest.mark.parametrize("latent", [False, True])
def test_nan_stays_in_its_row(latent: bool):
    generator = torch.Generator().manual_seed(0)
    batch = ragged([(30, 2, []), (30, 1, [-1, -1]), (70, 1, [])], generator, padded_to=9)
    kv = cache(generator, 1, 40, 32, torch.float16, values_in_keys=True) if latent else cache(generator, 2, 16, 16, torch.float16)
    q = torch.randn(9, 4, kv.k[0].shape[-1], generator=generator).half()
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
@pytest.mark.parametrize("is_fp8", [False, True])
def test_bits_of_a_token_do_not_depend_on_the_batch(is_fp8: bool):
    """The same context alone, as the end of a prompt, of a chain and among other rows, with wider block tables."""
    generator = torch.Generator().manual_seed(0)
    kv = cache(generator, 2, 16, 16, torch.float16, is_fp8=is_fp8)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [5, pytest.param(40, marks=pytest.mark.slow)])
def test_bits_of_keys_that_hold_their_values_do_not_depend_on_the_batch(heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """A token alone, among others and at the end of a prompt, whoever folds its pieces."""
    generator = torch.Generator().manual_seed(0)
    whole = ragged([(86, 4, [])], generator)
    kv = cache(generator, 1, 40, 32, dtype, values_in_keys=True)
    q = torch.randn(4, heads, 40, generator=generator).to(dtype)
    wanted = attend(q, kv, whole, 0.2, split_places=64)[3]
    made = ragged([(3, 1, []), (89, 1, [])], torch.Generator().manual_seed(9))
    tables = torch.zeros(2, 60, dtype=torch.int32)
    tables[0, : made.block_tables.shape[1]], tables[1, : whole.block_tables.shape[1]] = made.block_tables[0], whole.block_tables[0]
    made = replace(made, block_tables=tables)
    of = attention._Tiles.latent
    for programs in (0, 10**6):
        monkeypatch.setattr(attention._Tiles, "latent", lambda *args, programs=programs: replace(of(*args), programs=programs))
        assert torch.equal(attend(q[[0, 3]], kv, made, 0.2, split_places=64)[1], wanted)


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
