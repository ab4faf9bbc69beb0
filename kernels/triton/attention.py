"""Ragged paged attention: prompts, single tokens, chains and trees in one launch, long contexts cut into pieces.

Owns how a launch is cut, which nothing but shapes decides; the kernels are in attention_kernels.py.
"""

# a launch takes options that are no parameters
# pyright: reportCallIssue=false
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout import RaggedBatch
from .attention_kernels import attend, join
from .launch import MULTIPROCESSORS, ceil_div, power_of_two

_LOG2_E = 1.4426950408889634
_MAX_SPLITS = 32
_FIXED_TILE = 16


@dataclass(frozen=True)
class _Tiles:
    """How a launch is cut. Rows of a query tile are (token, query head) pairs."""

    rows: int
    places: int
    num_warps: int
    num_stages: int
    programs: int  # that should be at work at once

    @classmethod
    def of(cls, rows: int, dim: int, dtype: torch.dtype) -> _Tiles:
        """rows: wanted for the query tile; dim: the wider of k and v, a power of two."""
        if dtype == torch.float32:  # without tensor cores
            return cls(16, 32, 8, 2, 16 * MULTIPROCESSORS)
        if dim > 128:
            return cls(16, 32, 4, 3, 16 * MULTIPROCESSORS) if rows <= 16 else cls(64, 32, 8, 3, 2 * MULTIPROCESSORS)
        if rows <= 32:
            return cls(rows, 64, 4, 3, 16 * MULTIPROCESSORS)
        if rows <= 64:
            return cls(64, 64, 4, 3, 8 * MULTIPROCESSORS)
        return cls(128, 64, 8, 3, MULTIPROCESSORS)


def ragged_paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: RaggedBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    split_places: int | None = None,
) -> Tensor:
    """Attention of q [T, heads, k_dim] over what the cache holds, [T, heads, v_dim]. Who sees whom is said by RaggedBatch.

    k_cache [slots, kv_heads, k_dim], v_cache [slots, kv_heads, v_dim]: one layer of TorchKV, already written, in q's dtype or
    in float8. Padding tokens, those behind the last row too, get zeros. The launch depends on shapes alone (T, rows, width of
    the block tables), so that a CUDA graph holds for all values. split_places: the context is cut at its multiples (a multiple
    of 64), with the same tiles for any batch, so that a causal token's result is the same bits in all of them; scratch is then
    T * heads * v_dim floats for each piece. None = as suits the batch.
    """
    tokens, heads, k_dim = q.shape
    kv_heads, v_dim = v_cache.shape[1:]
    num_rows, width = batch.block_tables.shape
    out = torch.empty(tokens, heads, v_dim, dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    group = heads // kv_heads
    dim = power_of_two(max(k_dim, v_dim), 16)
    if split_places is None:
        wanted = power_of_two(ceil_div(tokens, max(num_rows, 1)) * group, 16)
        tiles = _Tiles.of(wanted, dim, q.dtype)
    else:
        tiles = _Tiles.of(_FIXED_TILE, dim, q.dtype)
    block_m = power_of_two(group, tiles.rows)
    tile_tokens = block_m // group
    max_places = width * batch.block_size
    if split_places is None:
        busy = max(ceil_div(tokens, tile_tokens), min(num_rows, tokens)) * kv_heads
        splits = max(1, min(tiles.programs // busy, ceil_div(max_places, tiles.places), _MAX_SPLITS))
    else:
        splits = ceil_div(max_places, split_places)
    partial = lse = out
    if splits > 1:
        partial = torch.empty(tokens, heads, splits, v_dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(tokens, heads, splits, dtype=torch.float32, device=q.device)
    num_tiles = tokens // tile_tokens + num_rows + 1
    attend[(num_tiles, kv_heads, splits)](
        q,
        k_cache,
        v_cache,
        out,
        partial,
        lse,
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
        scale * _LOG2_E if softcap is None else scale / softcap,
        0.0 if softcap is None else softcap * _LOG2_E,
        0 if window is None else window,
        KV_HEADS=kv_heads,
        GROUP=group,
        K_DIM=k_dim,
        V_DIM=v_dim,
        K_PAD=power_of_two(k_dim, 16),
        V_PAD=power_of_two(v_dim, 16),
        ROWS_PAD=power_of_two(num_rows + 1),
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
    )
    if splits > 1:
        join[(tokens, heads)](
            partial,
            lse,
            out,
            splits,
            HEADS=heads,
            V_DIM=v_dim,
            V_PAD=power_of_two(v_dim),
            SPLITS_PAD=power_of_two(splits),
            IN_ORDER=split_places is not None,
            num_warps=4 if split_places is None else 1,
        )
    return out
