"""Between the q | k | v product and attention, in one Triton launch: norms of q and k, rotation, the cache write.

The cache may be narrower than what is computed: keys and values are rounded once, from float32, as they are stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .early_launch import launch_options, let_next_come, wait_for_inputs
from .launch import ceil_div, power_of_two

_HEADS = 4
"""Most heads that one program handles."""


def rotate_and_store(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    table: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    norm_last: bool = False,
) -> Tensor | None:
    """Normalise and rotate q and k, store k and v in the cache, return q [T, heads, k_dim] (a new tensor; None for None). One may be None.

    q [T, heads, k_dim], k [T, kv_heads, k_dim], v [T, kv_heads, v_dim]: views into one buffer will do, as long as the heads of a
    token lie side by side. k_cache, v_cache: one layer of TorchKV, e4m3 too; v None: the values are in the keys. slot_mapping,
    positions [T] int64; slot -1 is written nowhere.
    table [length, 2 n]: cosines, then sines (`rope_table_values`); None = no rotation; dimensions past 2 n stay as they are.
    q_norm, k_norm [k_dim]: weights of an RMS norm over each head, whatever is stored less one already added; None = no norm.
    norm_last: the norms come behind the rotation, which leaves lengths as they are.
    """
    given = k if q is None else q
    assert given is not None, "neither queries nor keys"
    tokens, _, k_dim = given.shape
    heads, kv_heads = 0 if q is None else q.shape[1], 0 if k is None else k.shape[1]
    rotated = 0 if table is None else table.shape[1] // 2
    out = None if q is None else torch.empty(tokens, heads, k_dim, dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    q_blocks, kv_blocks, v_dim = ceil_div(heads, _HEADS), ceil_div(kv_heads, _HEADS), 0 if v is None else v.shape[2]
    _rotate_and_store[(tokens, q_blocks + (1 if v is None else 2) * kv_blocks)](
        q,
        k,
        v,
        out,
        k_cache,
        v_cache,
        slot_mapping,
        positions,
        table,
        q_norm,
        k_norm,
        0 if q is None else q.stride(0),
        0 if k is None else k.stride(0),
        0 if v is None else v.stride(0),
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        K_DIM=k_dim,
        V_DIM=v_dim,
        ROTATED=rotated,
        ROTATED_PAD=power_of_two(rotated),
        REST_PAD=power_of_two(k_dim - 2 * rotated),
        V_PAD=power_of_two(v_dim),
        HAS_NORM=q_norm is not None or k_norm is not None,
        NORM_LAST=norm_last,
        HEAD_BLOCK=_HEADS,
        num_warps=2,
        **launch_options(given.device),
    )
    return out


@triton.jit
def _rotate_and_store(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_ptr,
    position_ptr,
    table_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_stride,
    k_stride,
    v_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    ROTATED_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    HAS_NORM: tl.constexpr,
    NORM_LAST: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_come(EARLY)
    Q_BLOCKS: tl.constexpr = (HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    KV_BLOCKS: tl.constexpr = (KV_HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    position = tl.load(position_ptr + token).to(tl.int64)
    wait_for_inputs(EARLY)
    kv_heads = tl.where(slot >= 0, KV_HEADS, 0)  # not `& (slot >= 0)`: of a block and a scalar, later interpreters make no mask
    # Names of one branch must not meet those of another, so each is a function.
    if block < Q_BLOCKS:
        if HEADS > 0:
            head = block * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)[:, None]
            _normed_and_rotated(
                q_ptr + token * q_stride + head * K_DIM,
                out_ptr + (token * HEADS + head) * K_DIM,
                head < HEADS,
                q_norm_ptr,
                table_ptr,
                position,
                eps,
                K_DIM,
                ROTATED,
                ROTATED_PAD,
                REST_PAD,
                HAS_NORM,
                NORM_LAST,
            )
    elif block < Q_BLOCKS + KV_BLOCKS:
        if KV_HEADS > 0:
            head = (block - Q_BLOCKS) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)[:, None]
            _normed_and_rotated(
                k_ptr + token * k_stride + head * K_DIM,
                k_cache_ptr + (slot * KV_HEADS + head) * K_DIM,
                head < kv_heads,
                k_norm_ptr,
                table_ptr,
                position,
                eps,
                K_DIM,
                ROTATED,
                ROTATED_PAD,
                REST_PAD,
                HAS_NORM,
                NORM_LAST,
            )
    elif V_DIM > 0:
        head = (block - Q_BLOCKS - KV_BLOCKS) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)[:, None]
        dim = tl.arange(0, V_PAD)[None, :]
        kept = (head < kv_heads) & (dim < V_DIM)
        v = tl.load(v_ptr + token * v_stride + head * V_DIM + dim, mask=kept, other=0.0)
        tl.store(v_cache_ptr + (slot * KV_HEADS + head) * V_DIM + dim, _rounded(v, v_cache_ptr), mask=kept)


@triton.jit
def _normed_and_rotated(
    source,
    target,
    kept,
    norm_ptr,
    table_ptr,
    position,
    eps,
    K_DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    ROTATED_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    HAS_NORM: tl.constexpr,
    NORM_LAST: tl.constexpr,
):
    """Heads at source [n, 1] to target [n, 1], in three pieces: the two halves that turn, and what does not."""
    REST: tl.constexpr = K_DIM - 2 * ROTATED
    square = tl.zeros(kept.shape, tl.float32)
    if ROTATED > 0:
        dim = tl.arange(0, ROTATED_PAD)[None, :]
        in_half = kept & (dim < ROTATED)
        first = tl.load(source + dim, mask=in_half, other=0.0).to(tl.float32)
        second = tl.load(source + ROTATED + dim, mask=in_half, other=0.0).to(tl.float32)
        if HAS_NORM:
            square += tl.sum(first * first + second * second, 1, keep_dims=True)
    if REST > 0:
        rest_dim = 2 * ROTATED + tl.arange(0, REST_PAD)[None, :]
        in_rest = kept & (rest_dim < K_DIM)
        rest = tl.load(source + rest_dim, mask=in_rest, other=0.0).to(tl.float32)
        if HAS_NORM:
            square += tl.sum(rest * rest, 1, keep_dims=True)
    length = tl.sqrt(square / K_DIM + eps)
    if ROTATED > 0:
        row = table_ptr + position * (2 * ROTATED)
        cos = tl.load(row + dim, mask=dim < ROTATED, other=0.0).to(tl.float32)
        sin = tl.load(row + ROTATED + dim, mask=dim < ROTATED, other=0.0).to(tl.float32)
        if HAS_NORM:
            first_weight = tl.load(norm_ptr + dim, mask=dim < ROTATED, other=0.0).to(tl.float32)
            second_weight = tl.load(norm_ptr + ROTATED + dim, mask=dim < ROTATED, other=0.0).to(tl.float32)
            first = first / length
            second = second / length
            if not NORM_LAST:
                first *= first_weight
                second *= second_weight
        turned_first = first * cos - second * sin
        turned_second = second * cos + first * sin
        if NORM_LAST:
            turned_first *= first_weight
            turned_second *= second_weight
        tl.store(target + dim, _rounded(turned_first, target), mask=in_half)
        tl.store(target + ROTATED + dim, _rounded(turned_second, target), mask=in_half)
    if REST > 0:
        if HAS_NORM:
            rest = rest / length * tl.load(norm_ptr + rest_dim, mask=rest_dim < K_DIM, other=0.0).to(tl.float32)
        tl.store(target + rest_dim, _rounded(rest, target), mask=in_rest)


@triton.jit
def _rounded(x, target):
    """x in the number format of what target points to; e4m3 has no infinity, so what is beyond its range stays at its ends."""
    if target.dtype.element_ty == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(target.dtype.element_ty)
