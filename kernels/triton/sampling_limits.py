"""What top_k, top_p and min_p leave of one row of logits, found by bisection, and the race between what is left.

Functions of Triton kernels. A token is known by its distance from the best one, (peak - score) / temperature >= 0, as the bits
of that float: integers in the same order. `kept_blocks` are the blocks of the vocabulary where anything can be left, in order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .noise import exponential_at


@triton.jit
def distance_bits(x, peak, temperature):
    """(peak - x) / temperature >= 0, as the bits of the float: integers in the same order, 0x7F800000 for -inf."""
    return tl.div_rn(peak - x, tl.zeros_like(x) + temperature).to(tl.int32, bitcast=True)


@triton.jit
def weights_left(distance, token, last, last_id):
    """Weights exp(-distance) of tokens that are left, else 0."""
    is_left = (distance < last) | ((distance == last) & (token <= last_id))
    return tl.where(is_left, tl.exp(-distance.to(tl.float32, bitcast=True)), 0.0)


@triton.jit
def farthest_left(block_distances, masses, top_k, top_p, log_min_p, whole, vocab_size, blocks, BLOCK: tl.constexpr):
    """A distance beyond which no token can be left, found from the blocks' best tokens and masses alone."""
    farthest = tl.full((), 0x7F800000, tl.int32)
    if top_k >= vocab_size:
        if top_p < 1.0:
            # All tokens below (1 - top_p) * whole / vocab_size together are too light to be needed.
            bound = 0.001 - tl.log((1.0 - top_p) * whole / vocab_size).to(tl.float32)
            farthest = (tl.maximum(bound, 0.0) + 0.0).to(tl.int32, bitcast=True)
        else:
            farthest = (0.0 - log_min_p).to(tl.int32, bitcast=True)
    if tl.where(top_k < vocab_size, top_k <= blocks, top_p < 1.0):
        # The least distance within which there is enough for certain: tokens, one of each block that begins there; or mass, rounding
        # included, of such a block its best token and all but what the other ones would weigh just beyond.
        wanted = tl.where(top_k < vocab_size, top_k.to(tl.float32), (top_p * whole * 1.0001).to(tl.float32))
        low = tl.full((), 0, tl.int32)
        while low < farthest:
            middle = low + (farthest - low) // 2
            beyond = (BLOCK - 1) * tl.exp(-middle.to(tl.float32, bitcast=True))
            certain = tl.maximum(tl.exp(-block_distances.to(tl.float32, bitcast=True)), masses - beyond)
            certain = tl.where(top_k < vocab_size, 1.0, certain)
            if tl.sum(tl.where(block_distances <= middle, certain, 0.0), 0) >= wanted:
                farthest = middle
            else:
                low = middle + 1
    return farthest


@triton.jit
def limits(
    row,
    kept_blocks,
    num_kept,
    peak,
    temperature,
    farthest,
    top_k,
    top_p,
    log_min_p,
    whole,
    vocab_size,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """(distance of the last token that is left, id of the last one that is at this distance)."""
    last = farthest
    num_equal = tl.full((), 1 << 30, tl.int32)  # tokens at distance `last` that may stay
    if top_k < vocab_size:
        low = tl.full((), 0, tl.int32)
        while low < last:
            middle = low + (last - low) // 2
            if _count_within(row, kept_blocks, num_kept, peak, temperature, middle, vocab_size, BLOCK, BLOCKS) >= top_k:
                last = middle
            else:
                low = middle + 1
        num_equal = top_k - _count_within(row, kept_blocks, num_kept, peak, temperature, last - 1, vocab_size, BLOCK, BLOCKS)
        whole = _mass_within(row, kept_blocks, num_kept, peak, temperature, last - 1, vocab_size, BLOCK, BLOCKS)
        whole += num_equal * tl.exp(-last.to(tl.float32, bitcast=True)).to(tl.float64)
    if top_p < 1.0:
        # The farthest distance before which the mass has not yet reached top_p, then the last token up to there.
        wanted = top_p * whole
        low = tl.full((), 0, tl.int32)
        high = last
        while low < high:
            middle = high - (high - low) // 2
            if _mass_within(row, kept_blocks, num_kept, peak, temperature, middle - 1, vocab_size, BLOCK, BLOCKS) < wanted:
                low = middle
            else:
                high = middle - 1
        nearest = _last_within(row, kept_blocks, num_kept, peak, temperature, low, vocab_size, BLOCK, BLOCKS)
        before = _mass_within(row, kept_blocks, num_kept, peak, temperature, nearest - 1, vocab_size, BLOCK, BLOCKS)
        each = tl.maximum(tl.exp(-nearest.to(tl.float32, bitcast=True)).to(tl.float64), 1e-300)
        fitting = tl.ceil(tl.minimum((wanted - before) / each, 1e9)).to(tl.int32)
        num_equal = tl.where(nearest == last, tl.minimum(fitting, num_equal), fitting)
        last = nearest
    last_id = _id_of_equal(row, kept_blocks, num_kept, peak, temperature, last, num_equal, vocab_size, BLOCK, BLOCKS)
    bound = (0.0 - log_min_p).to(tl.int32, bitcast=True)
    return tl.minimum(last, bound), tl.where(bound < last, 1 << 30, last_id)


@triton.jit
def race(
    row,
    kept_blocks,
    num_kept,
    peak,
    temperature,
    last,
    last_id,
    key,
    vocab_size,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The first round of the race, between what is left of the kept blocks: the winning block."""
    best = tl.full((), -1.0, tl.float32)
    winner = tl.full((), 0, tl.int32)
    for start in range(0, num_kept, BLOCKS):
        rank = start + tl.arange(0, BLOCKS)
        block = tl.load(kept_blocks + rank, mask=rank < num_kept, other=0)
        token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        mask = (rank < num_kept)[:, None] & (token < vocab_size)
        x = tl.load(row + token, mask=mask, other=float("-inf")).to(tl.float32)
        weights = weights_left(distance_bits(x, peak, temperature), token, last, last_id)
        raced = tl.where(rank < num_kept, tl.sum(weights, 1) / exponential_at(key, block + BLOCK), -1.0)
        first = tl.max(raced, 0)
        first_block = tl.min(tl.where(raced == first, block, 1 << 30), 0)
        winner = tl.where(first > best, first_block, winner)
        best = tl.maximum(best, first)
    return winner


@triton.jit
def _count_within(row, kept_blocks, num_kept, peak, temperature, distance, vocab_size, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """How many tokens lie no farther than `distance`."""
    count = tl.full((), 0, tl.int32)
    for start in range(0, num_kept, BLOCKS):
        distances = _distances_of(row, kept_blocks, start, num_kept, peak, temperature, vocab_size, BLOCK, BLOCKS)
        count += tl.sum((distances <= distance).to(tl.int32), 0)
    return count


@triton.jit
def _mass_within(row, kept_blocks, num_kept, peak, temperature, distance, vocab_size, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """The mass of tokens no farther than `distance`, in float64."""
    mass = tl.full((), 0.0, tl.float64)
    for start in range(0, num_kept, BLOCKS):
        distances = _distances_of(row, kept_blocks, start, num_kept, peak, temperature, vocab_size, BLOCK, BLOCKS)
        weights = tl.where(distances <= distance, tl.exp(-distances.to(tl.float32, bitcast=True)), 0.0)
        mass += tl.sum(weights.to(tl.float64), 0)
    return mass


@triton.jit
def _last_within(row, kept_blocks, num_kept, peak, temperature, distance, vocab_size, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """The farthest token's distance of those no farther than `distance`."""
    found = tl.full((), 0, tl.int32)
    for start in range(0, num_kept, BLOCKS):
        distances = _distances_of(row, kept_blocks, start, num_kept, peak, temperature, vocab_size, BLOCK, BLOCKS)
        found = tl.maximum(found, tl.max(tl.where(distances <= distance, distances, 0), 0))
    return found


@triton.jit
def _id_of_equal(
    row, kept_blocks, num_kept, peak, temperature, distance, number, vocab_size, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    """Id of the token that comes as this number (from 1) among those at exactly this distance; the last one if there are fewer."""
    found = tl.full((), -1, tl.int32)
    before = tl.full((), 0, tl.int32)
    for start in range(0, num_kept, BLOCKS):
        distances = _distances_of(row, kept_blocks, start, num_kept, peak, temperature, vocab_size, BLOCK, BLOCKS)
        is_equal = (distances == distance).to(tl.int32)
        index = tl.arange(0, BLOCK * BLOCKS)
        some = tl.load(kept_blocks + start + index // BLOCK, mask=start + index // BLOCK < num_kept, other=0)
        number_here = before + tl.cumsum(is_equal, 0)
        stays = (is_equal > 0) & (number_here <= number)
        found = tl.maximum(found, tl.max(tl.where(stays, some * BLOCK + index % BLOCK, -1), 0))
        before += tl.sum(is_equal, 0)
    return found


@triton.jit
def _distances_of(row, kept_blocks, start, num_kept, peak, temperature, vocab_size, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Distances of the tokens of BLOCKS kept blocks, in order of their ids; beyond all for what is none."""
    index = tl.arange(0, BLOCK * BLOCKS)
    rank = start + index // BLOCK
    some = tl.load(kept_blocks + rank, mask=rank < num_kept, other=0)
    token = some * BLOCK + index % BLOCK
    mask = (rank < num_kept) & (token < vocab_size)
    x = tl.load(row + token, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.where(mask, distance_bits(x, peak, temperature), 0x7F800001)
