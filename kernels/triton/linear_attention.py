"""Linear attention over ragged rows in Triton: the gated delta rule (Yang et al. 2025), state spaces (Dao and Gu 2024), the gated norm.

A program has some columns of one head's state of one row in registers and takes the row's tokens in order: first the accepted guesses
of the pass before, then the known tokens, then guesses. Nothing is read on the host, and grids depend on padded sizes alone.
"""

from __future__ import annotations

import math
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
class Memory:
    """One layer's: its sizes and its numbers."""

    num_k: int
    num_v: int  # a multiple of num_k
    k_dim: int
    v_dim: int
    decay: Tensor  # [num_v] float32, -exp of the op's
    offset: Tensor  # [num_v] float32, the op's step
    skip: Tensor | None = None  # [num_v] float32 of a state space; None = the gated delta rule
    least: float = 0.0
    most: float = math.inf


def linear_attention(
    x: Tensor, b: Tensor, a: Tensor, memory: Memory, batch: RaggedBatch, rows: RowStates, states: Tensor, guesses: Tensor
) -> Tensor:
    """[T, num_v * v_dim] in x's dtype: what each new token reads from the memory, 0 for padding.

    x [T, q | k | v], b and a [T, num_v] as in `program.GatedDelta`, or x [T, v | k | q] and a as in `program.StateSpace` and a again for
    b; each with its columns side by side. states [slots, num_v * k_dim * v_dim] float32 and guesses [slots, G, x | b | a or x | a] of
    this layer: rows' sources are read, targets and copies written. All tensors are on the device.
    """
    shape, num_rows = (len(x), memory.num_v * memory.v_dim), len(batch.seq_lens)
    if not num_rows:
        return x.new_zeros(shape)
    read = x.new_empty(shape)
    if len(x):
        _scan[(ceil_div(memory.v_dim, _TILE), memory.num_v, num_rows)](
            x, b, a, memory.decay, memory.offset, memory.skip, read, states, guesses,
            batch.query_start_loc, batch.seq_lens, batch.num_causal, batch.tree_mask,
            rows.sources, rows.targets, rows.accepted, rows.num_known, rows.copy_places, rows.copy_slots,
            len(x), x.stride(0), b.stride(0), a.stride(0), guesses.shape[1], memory.k_dim**-0.5, memory.least, memory.most,
            CORRECTS=memory.skip is None, K_HEADS=memory.num_k, V_HEADS=memory.num_v, K_DIM=memory.k_dim, V_DIM=memory.v_dim,
            K_PAD=power_of_two(memory.k_dim), TILE=_TILE, num_warps=1, **launch_options(x.device),
        )
    return read


def gated_norm(read: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """read / sqrt(mean(read^2) + eps) * weight * silu(z) over each head of read and z [T, heads * v_dim]; weight [v_dim] float32."""
    out, heads = torch.empty_like(read), read.shape[1] // len(weight)
    if out.numel():
        _gated_norm[(len(read), ceil_div(heads, _HEADS))](
            read, z, weight, out, z.stride(0), eps,
            V_HEADS=heads, V_DIM=len(weight), V_PAD=power_of_two(len(weight)), HEADS=_HEADS, num_warps=2, **launch_options(read.device),
        )
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def _scan(
    x_ptr, b_ptr, a_ptr, decay_ptr, offset_ptr, skip_ptr, read_ptr, states_ptr, guesses_ptr,
    starts_ptr, ends_ptr, causal_ptr, mask_ptr,
    sources_ptr, targets_ptr, accepted_ptr, known_ptr, copy_places_ptr, copy_slots_ptr,
    num_tokens, x_stride, b_stride, a_stride, num_guesses, q_scale, least, most,
    CORRECTS: tl.constexpr, K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    K_PAD: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):
    await_inputs(EARLY)
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts_ptr + row)
    length = tl.load(starts_ptr + row + 1) - start
    KEYS: tl.constexpr = K_HEADS * K_DIM
    VALUES: tl.constexpr = V_HEADS * V_DIM
    i, j = tl.arange(0, K_PAD), tl.arange(0, TILE) + tile * TILE
    has_i, has_j = i < K_DIM, j < V_DIM
    out_at = read_ptr + head * V_DIM + j
    # All rows' programs share in the padding.
    padding = tl.load(starts_ptr + tl.num_programs(2))
    for step in range(row, num_tokens - padding, tl.num_programs(2)):
        tl.store(out_at + (padding + step).to(tl.int64) * VALUES, tl.zeros_like(j).to(read_ptr.dtype.element_ty), mask=has_j)
    if length == 0:
        return
    # Where a token has its numbers: q | k | v and, if kept, b | a behind them; or v | k | q and a.
    key, value = head * K_HEADS // V_HEADS * K_DIM + i, head * V_DIM + j
    if CORRECTS:
        q_at, k_at, v_at = key, KEYS + key, 2 * KEYS + value
    else:
        q_at, k_at, v_at = VALUES + KEYS + key, VALUES + key, value
    b_at = 2 * KEYS + VALUES + head
    a_at = b_at + V_HEADS if CORRECTS else b_at
    WIDTH: tl.constexpr = 2 * KEYS + VALUES + (2 * V_HEADS if CORRECTS else V_HEADS)
    in_state = (head * K_DIM + i[:, None]) * V_DIM + j[None, :]
    has_state = has_i[:, None] & has_j[None, :]
    skip = 0.0 if CORRECTS else tl.load(skip_ptr + head)
    rule = tl.load(decay_ptr + head), tl.load(offset_ptr + head), skip, q_scale, least, most
    columns = q_at, k_at, v_at, has_i, has_j
    b_ptr += head
    a_ptr += head
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
    kept = guesses_ptr + source * num_guesses * WIDTH
    token = _load(kept, kept + b_at, kept + a_at, columns, num_accepted > 0)
    while num_accepted > 0:
        # The next one is on its way while this one is computed, here and below.
        kept = guesses_ptr + (source * num_guesses + tl.minimum(guess + 1, num_guesses - 1)) * WIDTH
        following = _load(kept, kept + b_at, kept + a_at, columns, num_accepted > 0)
        if (accepted >> guess) & 1 != 0:
            state, _ = _step(state, token, rule, CORRECTS)
            until_copy -= 1
            if until_copy == 0:
                tl.store(copied, state, mask=has_state)
            num_accepted -= 1
        guess += 1
        token = following

    # 2. Known tokens.
    at = start.to(tl.int64)
    token = _load(x_ptr + at * x_stride, b_ptr + at * b_stride, a_ptr + at * a_stride, columns, True)
    for step in range(0, known):
        at = (start + tl.minimum(step + 1, length - 1)).to(tl.int64)
        following = _load(x_ptr + at * x_stride, b_ptr + at * b_stride, a_ptr + at * a_stride, columns, True)
        state, read = _step(state, token, rule, CORRECTS)
        tl.store(out_at + (start + step).to(tl.int64) * VALUES, read.to(read_ptr.dtype.element_ty), mask=has_j)
        until_copy -= 1
        if until_copy == 0:
            tl.store(copied, state, mask=has_state)
        token = following
    if target >= 0:
        tl.store(states_ptr + target * STATE + in_state, state, mask=has_state)

    # 3. Guesses, of which what they are made of is kept. One that does not follow the one before begins again at the known state.
    behind_known = state
    owns_key = (tile == 0) & (head % (V_HEADS // K_HEADS) == 0)
    for step in range(known, length):
        among = step - num_causal  # tree tokens
        mask = tl.load(mask_ptr + start + step, mask=among > 0, other=0)
        if among > 0:
            if (mask >> (among - 1).to(tl.int64)) & 1 == 0:
                state = behind_known
                for other in range(known, step):
                    if (other < num_causal) | ((mask >> tl.maximum(other - num_causal, 0).to(tl.int64)) & 1 != 0):
                        at = (start + other).to(tl.int64)
                        earlier = _load(x_ptr + at * x_stride, b_ptr + at * b_stride, a_ptr + at * a_stride, columns, True)
                        state, _ = _step(state, earlier, rule, CORRECTS)
        at = (start + tl.minimum(step + 1, length - 1)).to(tl.int64)
        following = _load(x_ptr + at * x_stride, b_ptr + at * b_stride, a_ptr + at * a_stride, columns, True)
        state, read = _step(state, token, rule, CORRECTS)
        tl.store(out_at + (start + step).to(tl.int64) * VALUES, read.to(read_ptr.dtype.element_ty), mask=has_j)
        if target >= 0:
            kept = guesses_ptr + (target * num_guesses + step - known) * WIDTH
            kind = guesses_ptr.dtype.element_ty
            q, k, v, b, a = token
            tl.store(kept + v_at, v.to(kind), mask=has_j)
            tl.store(kept + q_at, q.to(kind), mask=has_i & owns_key)
            tl.store(kept + k_at, k.to(kind), mask=has_i & owns_key)
            tl.store(kept + b_at, b.to(kind), mask=tile == 0)
            tl.store(kept + a_at, a.to(kind), mask=tile == 0)
        token = following


@triton.jit
def _load(x_ptr, b_ptr, a_ptr, columns, is_there):
    """q, k [K_PAD], v [TILE], b and a of a token, as they are; zeros if it is not there."""
    q_at, k_at, v_at, has_i, has_j = columns
    q, k = tl.load(x_ptr + q_at, mask=has_i & is_there, other=0.0), tl.load(x_ptr + k_at, mask=has_i & is_there, other=0.0)
    v = tl.load(x_ptr + v_at, mask=has_j & is_there, other=0.0)
    return q, k, v, tl.load(b_ptr, mask=is_there, other=0.0), tl.load(a_ptr, mask=is_there, other=0.0)


@triton.jit
def _step(state, token, rule, CORRECTS: tl.constexpr):
    """One token: the new state [K_PAD, TILE], and what is read from it [TILE]. All sums over the state are of the old one, so that
    none waits for another: q @ (S + outer(k, w)) = q @ S + (q @ k) w."""
    q, k, v, b, a = token
    decay, offset, skip, q_scale, least, most = rule
    q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
    x = a.to(tl.float32) + offset
    power = tl.exp(tl.minimum(x, 20.0))
    whole = 1.0 + power
    exact = tl.where(whole == 1.0, power, tl.log(whole) * (power / tl.where(whole == 1.0, 1.0, whole - 1.0)))  # log1p(power) by Kahan
    softplus = tl.where(x > 20.0, x, exact)
    if CORRECTS:
        q *= q_scale / tl.sqrt(tl.sum(q * q, 0) + 1e-6)
        k *= 1.0 / tl.sqrt(tl.sum(k * k, 0) + 1e-6)
        state *= tl.exp(decay * softplus)
        added = (v - tl.sum(k[:, None] * state, 0)) * (1.0 / (1.0 + tl.exp(-b.to(tl.float32))))
    else:
        softplus = tl.minimum(tl.maximum(softplus, least), most)
        state *= tl.exp(decay * softplus)
        added = v * softplus
    read = tl.sum(q[:, None] * state, 0) + tl.sum(q * k, 0) * added + skip * v
    return state + k[:, None] * added[None, :], read


@triton.jit
def _gated_norm(
    read_ptr, z_ptr, weight_ptr, out_ptr, z_stride, eps,
    V_HEADS: tl.constexpr, V_DIM: tl.constexpr, V_PAD: tl.constexpr, HEADS: tl.constexpr, EARLY: tl.constexpr,
):
    await_inputs(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head, j = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, V_PAD)
    at = head[:, None] * V_DIM + j[None, :]
    inside = (head < V_HEADS)[:, None] & (j < V_DIM)[None, :]
    read = tl.load(read_ptr + token * V_HEADS * V_DIM + at, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + token * z_stride + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + j, mask=j < V_DIM, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(read * read, 1) / V_DIM + eps)
    y = read * scale[:, None] * weight[None, :] * z / (1.0 + tl.exp(-z))
    tl.store(out_ptr + token * V_HEADS * V_DIM + at, y.to(out_ptr.dtype.element_ty), mask=inside)
