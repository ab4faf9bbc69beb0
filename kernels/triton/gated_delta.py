"""The gated delta rule over ragged rows in Triton (Yang et al. 2025), and the gated norm behind it.

A program has some columns of one head's state of one row in registers and takes the row's tokens in order: first the accepted guesses
of the pass before, then the known tokens, then guesses. Nothing is read on the host, and grids depend on padded sizes alone.
"""

# a launch takes options that are no parameters
# pyright: reportCallIssue=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import RaggedBatch, RowStates
from .early_launch import await_inputs, launch_options
from .launch import ceil_div, power_of_two

_TILE = 8
"""Columns of the state that one program, which is one warp, has: with 128 rows 32 registers a thread."""

_HEADS = 4
"""That one program normalises."""


@dataclass(frozen=True)
class DeltaHeads:
    """Sizes of one layer's heads."""

    num_k: int
    num_v: int  # a multiple of num_k
    k_dim: int
    v_dim: int


def gated_delta(
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    decay: Tensor,
    offset: Tensor,
    heads: DeltaHeads,
    batch: RaggedBatch,
    rows: RowStates,
    states: Tensor,
    guesses: Tensor,
) -> Tensor:
    """[T, num_v * v_dim] in qkv's dtype: what each new token reads from the memory; what padding reads is not written.

    qkv [T, q | k | v], b and a [T, num_v] as in `program.GatedDelta`, each with its columns side by side. decay, offset [num_v] float32:
    -exp of the op's decay, and its step. states [slots, num_v * k_dim * v_dim] float32 and guesses [slots, G, q | k | v | b | a] of this
    layer: rows' sources are read, targets and copies written. All tensors are on the device.
    """
    tokens, num_rows = len(qkv), len(batch.seq_lens)
    read = torch.empty(tokens, heads.num_v * heads.v_dim, dtype=qkv.dtype, device=qkv.device)
    if tokens and num_rows:
        _delta[(ceil_div(heads.v_dim, _TILE), heads.num_v, num_rows)](
            qkv, b, a, decay, offset, read, states, guesses,
            batch.query_start_loc, batch.seq_lens, batch.num_causal, batch.tree_mask,
            rows.sources, rows.targets, rows.accepted, rows.num_known, rows.copy_places, rows.copy_slots,
            qkv.stride(0), b.stride(0), a.stride(0), guesses.shape[1], heads.k_dim**-0.5,
            K_HEADS=heads.num_k, V_HEADS=heads.num_v, K_DIM=heads.k_dim, V_DIM=heads.v_dim, K_PAD=power_of_two(heads.k_dim), TILE=_TILE,
            num_warps=1, **launch_options(qkv.device),
        )  # fmt: skip
    return read


def gated_norm(read: Tensor, z: Tensor, weight: Tensor, eps: float, heads: DeltaHeads, query_start_loc: Tensor) -> Tensor:
    """read / sqrt(mean(read^2) + eps) * weight * silu(z) over each head of read and z [T, num_v * v_dim]; padding counts as 0."""
    out = torch.empty_like(read)
    if out.numel():
        _gated_norm[(len(read), ceil_div(heads.num_v, _HEADS))](
            read, z, weight, out, query_start_loc, z.stride(0), len(query_start_loc) - 1, eps,
            V_HEADS=heads.num_v, V_DIM=heads.v_dim, V_PAD=power_of_two(heads.v_dim), HEADS=_HEADS,
            num_warps=2, **launch_options(read.device),
        )  # fmt: skip
    return out


@triton.jit
def _delta(
    qkv_ptr, b_ptr, a_ptr, decay_ptr, offset_ptr, read_ptr, states_ptr, guesses_ptr,
    starts_ptr, ends_ptr, causal_ptr, mask_ptr,
    sources_ptr, targets_ptr, accepted_ptr, known_ptr, copy_places_ptr, copy_slots_ptr,
    qkv_stride, b_stride, a_stride, num_guesses, q_scale,
    K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_PAD: tl.constexpr, TILE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts_ptr + row)
    length = tl.load(starts_ptr + row + 1) - start
    if length == 0:
        return
    KEYS: tl.constexpr = K_HEADS * K_DIM
    QKV: tl.constexpr = 2 * KEYS + V_HEADS * V_DIM
    WIDTH: tl.constexpr = QKV + 2 * V_HEADS
    i, j = tl.arange(0, K_PAD), tl.arange(0, TILE) + tile * TILE
    has_i, has_j = i < K_DIM, j < V_DIM
    q_at = head * K_HEADS // V_HEADS * K_DIM + i  # of the token's q | k | v
    k_at, v_at = KEYS + q_at, 2 * KEYS + head * V_DIM + j
    in_state = (head * K_DIM + i[:, None]) * V_DIM + j[None, :]
    has_state = has_i[:, None] & has_j[None, :]
    decay, offset = tl.load(decay_ptr + head), tl.load(offset_ptr + head)
    known, num_causal = tl.minimum(tl.load(known_ptr + row), length), tl.load(causal_ptr + row)
    source, target = tl.load(sources_ptr + row).to(tl.int64), tl.load(targets_ptr + row).to(tl.int64)
    copy_slot, accepted = tl.load(copy_slots_ptr + row).to(tl.int64), tl.load(accepted_ptr + row)
    STATE: tl.constexpr = V_HEADS * K_DIM * V_DIM

    # 1. The state to go on from, and what was accepted of the guesses that are kept beside it.
    state = tl.load(states_ptr + source * STATE + in_state, mask=has_state & (source >= 0), other=0.0)
    bits = tl.arange(0, 64).to(tl.int64)
    num_accepted = tl.sum(((accepted >> bits) & 1).to(tl.int32), 0)
    # So many steps from here the state is copied; never, if that is none of the next ones.
    until_copy = tl.load(copy_places_ptr + row) - (tl.load(ends_ptr + row) - length - num_accepted)
    until_copy = tl.where(copy_slot >= 0, until_copy, 0)
    copied = states_ptr + copy_slot * STATE + in_state
    guess = tl.full((), 0, tl.int64)
    while num_accepted > 0:
        if (accepted >> guess) & 1 != 0:
            kept = guesses_ptr + (source * num_guesses + guess) * WIDTH
            q, k, v = _load(kept, q_at, k_at, v_at, has_i, has_j)
            b, a = tl.load(kept + QKV + head), tl.load(kept + QKV + V_HEADS + head)
            state, _ = _step(state, q, k, v, b, a, decay, offset, q_scale)
            until_copy -= 1
            if until_copy == 0:
                tl.store(copied, state, mask=has_state)
            num_accepted -= 1
        guess += 1

    # 2. Known tokens. The next one is on its way while this one is computed.
    at = start.to(tl.int64)
    q, k, v = _load(qkv_ptr + at * qkv_stride, q_at, k_at, v_at, has_i, has_j)
    b, a = tl.load(b_ptr + at * b_stride + head), tl.load(a_ptr + at * a_stride + head)
    for step in range(0, known):
        following = (start + tl.minimum(step + 1, length - 1)).to(tl.int64)
        next_q, next_k, next_v = _load(qkv_ptr + following * qkv_stride, q_at, k_at, v_at, has_i, has_j)
        next_b, next_a = tl.load(b_ptr + following * b_stride + head), tl.load(a_ptr + following * a_stride + head)
        state, read = _step(state, q, k, v, b, a, decay, offset, q_scale)
        out = read_ptr + (start + step).to(tl.int64) * V_HEADS * V_DIM + head * V_DIM + j
        tl.store(out, read.to(read_ptr.dtype.element_ty), mask=has_j)
        until_copy -= 1
        if until_copy == 0:
            tl.store(copied, state, mask=has_state)
        q, k, v, b, a = next_q, next_k, next_v, next_b, next_a
    if target >= 0:
        tl.store(states_ptr + target * STATE + in_state, state, mask=has_state)

    # 3. Guesses, of which what they are made of is kept. One that does not follow the one before begins again at the known state.
    behind_known = state
    owns_key = (tile == 0) & (head % (V_HEADS // K_HEADS) == 0)
    for step in range(known, length):
        token = (start + step).to(tl.int64)
        among = step - num_causal  # tree tokens
        mask = tl.load(mask_ptr + token, mask=among > 0, other=0)
        if among > 0:
            if (mask >> (among - 1).to(tl.int64)) & 1 == 0:
                state = behind_known
                for other in range(known, step):
                    if (other < num_causal) | ((mask >> tl.maximum(other - num_causal, 0).to(tl.int64)) & 1 != 0):
                        at = (start + other).to(tl.int64)
                        q, k, v = _load(qkv_ptr + at * qkv_stride, q_at, k_at, v_at, has_i, has_j)
                        b, a = tl.load(b_ptr + at * b_stride + head), tl.load(a_ptr + at * a_stride + head)
                        state, _ = _step(state, q, k, v, b, a, decay, offset, q_scale)
        q, k, v = _load(qkv_ptr + token * qkv_stride, q_at, k_at, v_at, has_i, has_j)
        b, a = tl.load(b_ptr + token * b_stride + head), tl.load(a_ptr + token * a_stride + head)
        state, read = _step(state, q, k, v, b, a, decay, offset, q_scale)
        out = read_ptr + token * V_HEADS * V_DIM + head * V_DIM + j
        tl.store(out, read.to(read_ptr.dtype.element_ty), mask=has_j)
        if target >= 0:
            kept = guesses_ptr + (target * num_guesses + step - known) * WIDTH
            kind = guesses_ptr.dtype.element_ty
            tl.store(kept + v_at, v.to(kind), mask=has_j)
            tl.store(kept + q_at, q.to(kind), mask=has_i & owns_key)
            tl.store(kept + k_at, k.to(kind), mask=has_i & owns_key)
            tl.store(kept + QKV + head, b.to(kind), mask=tile == 0)
            tl.store(kept + QKV + V_HEADS + head, a.to(kind), mask=tile == 0)


@triton.jit
def _load(token_ptr, q_at, k_at, v_at, has_i, has_j):
    """q, k [K_PAD] and v [TILE] as they are."""
    q = tl.load(token_ptr + q_at, mask=has_i, other=0.0)
    k = tl.load(token_ptr + k_at, mask=has_i, other=0.0)
    return q, k, tl.load(token_ptr + v_at, mask=has_j, other=0.0)


@triton.jit
def _step(state, q, k, v, b, a, decay, offset, q_scale):
    """One token: the new state [K_PAD, TILE], and what is read from it [TILE]. Both sums over the state are of the old one, so that
    neither waits for the other: q @ (S + outer(k, w)) = q @ S + (q @ k) w."""
    q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
    q *= q_scale / tl.sqrt(tl.sum(q * q, 0) + 1e-6)
    k *= 1.0 / tl.sqrt(tl.sum(k * k, 0) + 1e-6)
    x = a.to(tl.float32) + offset
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    state *= tl.exp(decay * softplus)
    strength = 1.0 / (1.0 + tl.exp(-b.to(tl.float32)))
    wrong = (v - tl.sum(k[:, None] * state, 0)) * strength
    read = tl.sum(q[:, None] * state, 0) + tl.sum(q * k, 0) * wrong
    return state + k[:, None] * wrong[None, :], read


@triton.jit(do_not_specialize=["num_rows"])
def _gated_norm(
    read_ptr, z_ptr, weight_ptr, out_ptr, starts_ptr, z_stride, num_rows, eps,
    V_HEADS: tl.constexpr, V_DIM: tl.constexpr, V_PAD: tl.constexpr, HEADS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head, j = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, V_PAD)
    at = head[:, None] * V_DIM + j[None, :]
    inside = (head < V_HEADS)[:, None] & (j < V_DIM)[None, :]
    is_read = token < tl.load(starts_ptr + num_rows)
    read = tl.load(read_ptr + token * V_HEADS * V_DIM + at, mask=inside & is_read, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + token * z_stride + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + j, mask=j < V_DIM, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(read * read, 1) / V_DIM + eps)
    y = read * scale[:, None] * weight[None, :] * z / (1.0 + tl.exp(-z))
    tl.store(out_ptr + token * V_HEADS * V_DIM + at, y.to(out_ptr.dtype.element_ty), mask=inside)
