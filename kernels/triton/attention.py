"""Ragged paged attention: prompts, single tokens, chains and trees in one launch, long contexts cut into pieces.

Owns how a launch is cut, which nothing but shapes decides; the kernels are in attention_kernels.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout import RaggedBatch
from .attention_kernels import attend, fold, join
from .early_launch import launch_options
from .launch import MULTIPROCESSORS, ceil_div, power_of_two, shared_bytes

LOG2_E = 1.4426950408889634
_MAX_SPLITS = 32
_MAX_LATENT_SPLITS = 128  # where all heads share one of keys, nothing but a token's places can be shared out
_JOINED_NUMBERS = 2**14  # that one program joins
_FIXED_TILE = 16
_MOST_STAGES_BYTES = 128 * 1024  # of shared memory, for the largest tiles of wide heads with as many stages as pay

_LEAST_ROWS_PAD = 512
"""Of the rows' starts, which a program looks through. Those are few enough that one build may serve any batch: otherwise kernels would
be built while requests wait, whenever there are twice as many as ever before."""

SCRATCH_BYTES = 128 * 2**20
"""Most that pieces of results may take. Where there would be more, tokens are handled by several launches, or in fewer pieces."""


@dataclass(frozen=True)
class _Tiles:
    """How a launch is cut. Rows of a query tile are (token, query head) pairs."""

    rows: int
    places: int
    num_warps: int
    num_stages: int
    programs: int  # that should be at work at once

    @classmethod
    def of(cls, rows: int, dim: int, dtype: torch.dtype, shared: int, most_places: int) -> _Tiles:
        """rows: wanted for the query tile; dim: the wider of k and v, a power of two; shared: bytes that a program may have;
        most_places: at least 64."""
        if dtype == torch.float32:  # without tensor cores
            return cls(16, 32, 8, 2, 16 * MULTIPROCESSORS) if dim <= 256 else cls(16, 16, 8, 1, 16 * MULTIPROCESSORS)
        if dim > 256:
            stages = 3 if shared >= _MOST_STAGES_BYTES else 2
            return cls(16, 32, 8, stages, 8 * MULTIPROCESSORS) if rows <= 16 else cls(32, 32, 8, stages, 4 * MULTIPROCESSORS)
        if dim > 128:
            if rows <= 16:
                return cls(16, 32, 4, 3, 16 * MULTIPROCESSORS)
            return cls(64, 32, 8, 3 if shared >= _MOST_STAGES_BYTES else 2, 2 * MULTIPROCESSORS)
        if rows <= 32:
            return cls(rows, 64, 4, 3, 4 * MULTIPROCESSORS) if most_places < 128 else cls(rows, 128, 4, 2, 4 * MULTIPROCESSORS)
        if rows <= 64:
            return cls(64, 64, 4, 3, 4 * MULTIPROCESSORS)
        return cls(128, 64, 8, 3, MULTIPROCESSORS)

    @classmethod
    def latent(cls, rows: int, v_dim: int, cache: Tensor, dtype: torch.dtype, shared: int, is_fixed: bool) -> _Tiles:
        """Where values are in the keys. Of 64 rows of 512 sums take half of all registers: where there are more to hold, 32 rows do."""
        if dtype == torch.float32:
            return cls(16, 16, 8, 1, 2 * MULTIPROCESSORS)
        has_room = shared >= _MOST_STAGES_BYTES
        is_narrow = cache.itemsize == 1
        rows = min(rows, 64 if has_room and not is_narrow and not is_fixed else 32)
        places = 16 if rows > 16 and (is_narrow or is_fixed or not has_room) else 32
        return cls(rows, places if v_dim > 256 else 2 * places, 8 if rows > 16 or is_narrow or is_fixed else 4, 3, 2 * MULTIPROCESSORS)


def ragged_paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: RaggedBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    split_places: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of q [T, heads, k_dim] over what the cache holds, [T, heads, v_dim]. Who sees whom is said by RaggedBatch.

    k_cache [slots, kv_heads, k_dim], v_cache [slots, kv_heads, v_dim]: one layer of TorchKV, already written, in q's dtype or in
    float8; v_cache may be a view of the keys' last v_dim numbers. Padding tokens, those behind the last row too, get zeros. The
    launch depends on shapes alone (T, rows, width of the block tables), so that a CUDA graph holds for all values. split_places: the
    context is cut at its multiples (a multiple of 64), with the same tiles for any batch, so that a causal token's result is the
    same bits in all of them. None = as suits the batch. sinks: [heads] float32, those of ops.Attention times log2(e). Scratch:
    SCRATCH_BYTES, or what a single token needs if that is more.
    """
    tokens, heads, k_dim = q.shape
    kv_heads, v_dim = v_cache.shape[1:]
    num_rows, width = batch.block_tables.shape
    out = torch.empty(tokens, heads, v_dim, dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    group = heads // kv_heads
    k_own = k_dim - v_dim if v_cache.stride(0) > kv_heads * v_dim else k_dim  # numbers of a key that are no values
    dim = power_of_two(max(k_dim, v_dim), 16)
    # Numbers of 8 bits are widened in registers, which there are too few of for more places.
    most_places = 64 if split_places is not None or k_cache.itemsize == 1 else 128
    wanted = _FIXED_TILE if split_places is not None else power_of_two(ceil_div(tokens, max(num_rows, 1)) * group, 16)
    if k_own == k_dim:
        tiles, parts, most_splits = _Tiles.of(wanted, dim, q.dtype, shared_bytes(q.device), most_places), 1, _MAX_SPLITS
    else:
        wanted = power_of_two(group, wanted)
        tiles = _Tiles.latent(wanted, v_dim, k_cache, q.dtype, shared_bytes(q.device), split_places is not None)
        parts = next(n for n in range(1, group + 1) if group % n == 0 and group // n <= tiles.rows)
        group, most_splits = group // parts, _MAX_LATENT_SPLITS
    block_m = power_of_two(group, tiles.rows)
    tile_tokens = block_m // group
    max_places = width * batch.block_size
    # Of a token's pieces, programs share what there is; where there are enough programs without that, one folds them all.
    pieces = ceil_div(max_places, tiles.places if split_places is None else split_places)
    splits = _splits(tiles, tokens, tile_tokens, num_rows, kv_heads * parts, pieces)
    step, partial, lse, spans = tokens, out, out, out
    if split_places is None:
        pieces = splits = max(1, min(splits, most_splits, SCRATCH_BYTES // (tokens * _token_scratch_bytes(heads, v_dim, 1))))
    elif splits > 1:
        step = min(tokens, max(SCRATCH_BYTES // _token_scratch_bytes(heads, v_dim, pieces), 1))
        splits = _splits(tiles, step, tile_tokens, num_rows, kv_heads * parts, pieces)
        spans = torch.empty(step, 2, dtype=torch.int32, device=q.device)
    if splits > 1:
        partial = torch.empty(step, heads, pieces, v_dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(step, heads, pieces, dtype=torch.float32, device=q.device)
    options = launch_options(q.device)
    for first_token in range(0, tokens, step):
        end_token = min(first_token + step, tokens)
        # Token t of row r is in tile t // tile_tokens + r or in the one before.
        first_tile = max(first_token // tile_tokens - 1, 0)
        end_tile = (end_token - 1) // tile_tokens + num_rows + 1
        attend[(end_tile - first_tile, kv_heads * parts, splits)](
            q,
            k_cache,
            v_cache,
            out,
            partial,
            lse,
            spans,
            sinks,
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_tables,
            batch.num_causal,
            batch.first_places,
            batch.tree_mask,
            batch.positions,
            batch.slot_mapping,
            tokens,
            num_rows,
            splits,
            q.stride(0),
            batch.block_tables.stride(0),
            scale * LOG2_E if softcap is None else scale / softcap,
            0.0 if softcap is None else softcap * LOG2_E,
            0 if window is None else window,
            first_token,
            end_token,
            first_tile,
            pieces,
            KV_HEADS=kv_heads,
            PARTS=parts,
            GROUP=group,
            K_DIM=k_dim,
            K_OWN=k_own,
            V_DIM=v_dim,
            K_PAD=power_of_two(k_own, 16),
            V_PAD=power_of_two(v_dim, 16),
            ROWS_PAD=power_of_two(num_rows + 1, _LEAST_ROWS_PAD),
            BLOCK_SIZE=batch.block_size,
            BLOCK_M=block_m,
            BLOCK_N=tiles.places,
            TILE_TOKENS=tile_tokens,
            IS_SPLIT=splits > 1,
            SPLIT_PLACES=split_places or 0,
            HAS_WINDOW=window is not None,
            HAS_SOFTCAP=softcap is not None,
            HAS_FIRST=batch.first_places is not None,
            # A loop of its own for tiles without masks pays where there is arithmetic to save. Never where bits must not depend on it.
            HAS_OPEN_TILES=block_m >= 64 and window is None and batch.first_places is None and split_places is None,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            **options,
        )
        if splits > 1:
            grid, shape, v_pad = (end_token - first_token, heads), {"HEADS": heads, "V_DIM": v_dim}, power_of_two(v_dim)
            if split_places is None:
                columns = min(v_pad, _JOINED_NUMBERS // most_splits)
                shape |= {"COLUMNS": columns, "SPLITS_PAD": most_splits}
                join[(*grid, v_pad // columns)](partial, lse, out, sinks, splits, **shape, num_warps=4, **options)
            else:
                shape |= {"V_PAD": v_pad, "AHEAD": 8}
                fold[grid](partial, lse, spans, out, sinks, pieces, first_token, **shape, num_warps=1, **options)
    return out


def _token_scratch_bytes(heads: int, v_dim: int, pieces: int) -> int:
    return 4 * (heads * pieces * (v_dim + 1) + 2)


def _splits(tiles: _Tiles, tokens: int, tile_tokens: int, num_rows: int, kv_heads: int, pieces: int) -> int:
    """How many programs share the places of a tile."""
    busy = max(ceil_div(tokens, tile_tokens), min(num_rows, tokens)) * kv_heads
    return max(1, min(tiles.programs // busy, pieces))
