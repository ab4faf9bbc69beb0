"""The target's own choice at every node of every draft, with no wait for the GPU.

Knows no requests: they are described by tensors. engine/logit_filters.py and kernels/noise.py say what is meant; this gives the
same tokens up to rounding. Nothing is sorted: one launch finds the greatest entry and the mass of each block of the vocabulary,
and sampling_limits.py then bounds what top_k, top_p and min_p leave, in the few blocks that matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..noise import BLOCK
from .launch import ceil_div, power_of_two
from .noise import exponential_at
from .sampling_limits import distance_bits, farthest_left, limits, race, weights_left

_BLOCKS_AT_ONCE = 16
_KEPT_AT_ONCE = 32


@dataclass(frozen=True)
class Places:
    """N places where a token is wanted. All on the logits' device."""

    logits_rows: Tensor  # [N] int64, row of the logits
    keys: Tensor  # [N] int64, noise.keys of stream and position
    temperature: Tensor  # [N] float32; 0 = greedy
    top_k: Tensor  # [N] int32; vocabulary size or more = all
    top_p: Tensor  # [N] float64; 1 = all
    log_min_p: Tensor  # [N] float32; -inf = all


def choose(logits: Tensor, places: Places) -> Tensor:
    """[N] int64: the target's token at each place; -1 = the logits have NaN or no finite best. Two launches.

    logits [M, V], of any floating point type, stay untouched.
    """
    count, vocab_size = len(places.logits_rows), logits.shape[1]
    blocks = ceil_div(vocab_size, BLOCK)
    device = logits.device
    tokens = torch.empty(count, dtype=torch.int64, device=device)
    if not count:
        return tokens
    # two tensors: where the halves of one begin depends on count, and kernels are built anew for what is aligned otherwise
    peaks, masses = (torch.empty(count, blocks, dtype=torch.float32, device=device) for _ in range(2))
    grid = (count, ceil_div(blocks, _BLOCKS_AT_ONCE))
    _summarise[grid](
        logits,
        places.logits_rows,
        places.temperature,
        peaks,
        masses,
        logits.stride(0),
        vocab_size,
        blocks,
        BLOCK=BLOCK,
        BLOCKS=_BLOCKS_AT_ONCE,
        num_warps=4,
    )
    _choose[(count,)](
        logits,
        places.logits_rows,
        places.keys,
        places.temperature,
        places.top_k,
        places.top_p,
        places.log_min_p,
        peaks,
        masses,
        torch.empty(count, blocks, dtype=torch.int32, device=device),
        tokens,
        logits.stride(0),
        vocab_size,
        blocks,
        BLOCK=BLOCK,
        BLOCKS=_KEPT_AT_ONCE,
        BLOCKS_PAD=power_of_two(blocks),
        num_warps=8,
    )
    return tokens


@triton.jit
def _summarise(
    logits_ptr, rows_ptr, temperature_ptr, peaks_ptr, masses_ptr, stride, vocab_size, blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    """Greatest score and mass (in units of the greatest) of each block of the vocabulary; NaN as greatest where there is one."""
    place = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    row = logits_ptr + tl.load(rows_ptr + place) * stride
    x = tl.load(row + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperature_ptr + place)
    temperature = tl.where(temperature > 0.0, temperature, 1.0)
    peak = tl.max(x, 1)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    mass = tl.sum(tl.exp((x - base[:, None]) / temperature), 1)
    has_nan = tl.max((x != x).to(tl.int32), 1) > 0
    at = place * blocks + block
    tl.store(peaks_ptr + at, tl.where(has_nan, float("nan"), peak), mask=block < blocks)
    tl.store(masses_ptr + at, mass, mask=block < blocks)


@triton.jit
def _choose(
    logits_ptr,
    rows_ptr,
    keys_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    log_min_p_ptr,
    peaks_ptr,
    masses_ptr,
    kept_blocks_ptr,
    tokens_ptr,
    stride,
    vocab_size,
    blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = logits_ptr + tl.load(rows_ptr + place) * stride
    block = tl.arange(0, BLOCKS_PAD)
    inside = tl.arange(0, BLOCK)
    peaks = tl.load(peaks_ptr + place * blocks + block, mask=block < blocks, other=float("-inf"))
    num_nan = tl.sum((peaks != peaks).to(tl.int32), 0)
    peak = tl.max(tl.where(peaks != peaks, float("-inf"), peaks), 0)
    if (num_nan > 0) | (tl.abs(peak) == float("inf")):
        tl.store(tokens_ptr + place, tl.full((), -1, tl.int64))
        return
    temperature = tl.load(temperature_ptr + place)
    if temperature == 0.0:
        winner = tl.min(tl.where(peaks == peak, block, BLOCKS_PAD), 0)
        token = winner * BLOCK + inside
        x = tl.load(row + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        tl.store(tokens_ptr + place, tl.min(tl.where(x == peak, token, vocab_size), 0).to(tl.int64))
        return

    key = tl.load(keys_ptr + place)
    top_k = tl.load(top_k_ptr + place)
    top_p = tl.load(top_p_ptr + place)
    log_min_p = tl.load(log_min_p_ptr + place)
    masses = tl.load(masses_ptr + place * blocks + block, mask=block < blocks, other=0.0)
    block_distances = distance_bits(peaks, peak, temperature)
    masses = masses * tl.exp(-block_distances.to(tl.float32, bitcast=True))
    # Distance 0x7F800000 is that of -inf. Of tokens at distance `last` only those up to id `last_id` are left.
    last = tl.full((), 0x7F800000, tl.int32)
    last_id = tl.full((), 1 << 30, tl.int32)
    is_filtered = (top_k < vocab_size) | (top_p < 1.0) | (log_min_p > float("-inf"))
    if is_filtered:
        whole = tl.sum(masses.to(tl.float64), 0)
        farthest = farthest_left(block_distances, masses, top_k, top_p, log_min_p, whole, vocab_size, blocks, BLOCK)
        # The blocks where anything can be left, in order.
        is_kept = (block < blocks) & (block_distances <= farthest)
        num_kept = tl.sum(is_kept.to(tl.int32), 0)
        kept_blocks = kept_blocks_ptr + place * blocks
        tl.store(kept_blocks + tl.cumsum(is_kept.to(tl.int32), 0) - 1, block, mask=is_kept)
        tl.debug_barrier()
        last, last_id = limits(
            row, kept_blocks, num_kept, peak, temperature, farthest, top_k, top_p, log_min_p, whole, vocab_size, BLOCK, BLOCKS
        )
        winner = race(row, kept_blocks, num_kept, peak, temperature, last, last_id, key, vocab_size, BLOCK, BLOCKS)
    else:
        raced = tl.where(block < blocks, masses / exponential_at(key, block + BLOCK), -1.0)
        winner = tl.min(tl.where(raced == tl.max(raced, 0), block, BLOCKS_PAD), 0)
    # The second round, inside the winning block.
    token = winner * BLOCK + inside
    x = tl.load(row + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    raced = weights_left(distance_bits(x, peak, temperature), token, last, last_id) / exponential_at(key, inside)
    tl.store(tokens_ptr + place, tl.min(tl.where(raced == tl.max(raced, 0), token, vocab_size), 0).to(tl.int64))
