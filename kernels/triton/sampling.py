"""The target's own choice at every node of every draft, and how far each draft follows it, without waiting for the GPU.

Knows no requests: they are described by tensors. engine/verifier.py, engine/logit_filters.py and kernels/noise.py say what is
meant; this gives the same tokens up to rounding. Nothing is sorted: one launch finds the greatest entry and the mass of each
block of the vocabulary, and what top_k and top_p leave is then bounded by bisection over the few blocks that matter.
"""

# a launch takes options that are no parameters
# pyright: reportCallIssue=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..noise import BLOCK
from .launch import ceil_div, power_of_two
from .noise import exponential_at

_BLOCKS_AT_ONCE = 16
_KEPT_AT_ONCE = 32


@dataclass(frozen=True)
class Places:
    """N places where a token is wanted, in the order of the rows (requests) that they belong to.

    A row is node 0 (behind the known tokens), then the nodes of its draft, parents before children. All on the logits' device.
    """

    logits_rows: Tensor  # [N] int64, row of the logits
    keys: Tensor  # [N] int64, noise.keys of stream and position
    temperature: Tensor  # [N] float32; 0 = greedy
    top_k: Tensor  # [N] int32; vocabulary size or more = all
    top_p: Tensor  # [N] float64; 1 = all
    log_min_p: Tensor  # [N] float32; -inf = all
    parents: Tensor  # [N] int32, the place before it in the same row's draft, -1 for node 0
    guesses: Tensor  # [N] int32, the draft token that leads to it, -1 for node 0
    row_starts: Tensor  # [R + 1] int32, first place of each row


@dataclass(frozen=True)
class Matches:
    """What each row emits: the drafted tokens that the target would have chosen too, then one of its own."""

    num_tokens: Tensor  # [R] int32, at least 1; 0 = the row's scores were not finite
    token_ids: Tensor  # [R, depth] int64; entries past num_tokens are meaningless
    nodes: Tensor  # [R, depth] int32, the row's node behind which each of them was chosen (the first is 0)


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
    peaks, masses = torch.empty(2, count, blocks, dtype=torch.float32, device=device)
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


def match(token_ids: Tensor, places: Places, depth: int) -> Matches:
    """Walk each row's draft as long as token_ids [N] (from `choose`) say the same. depth: most tokens that a row can emit."""
    rows = len(places.row_starts) - 1
    num_tokens = torch.empty(rows, dtype=torch.int32, device=token_ids.device)
    emitted = torch.empty(rows, depth, dtype=torch.int64, device=token_ids.device)
    nodes = torch.empty(rows, depth, dtype=torch.int32, device=token_ids.device)
    if rows:
        _match[(rows,)](token_ids, places.parents, places.guesses, places.row_starts, num_tokens, emitted, nodes, depth, num_warps=1)
    return Matches(num_tokens, emitted, nodes)


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
    block_distances = _distance(peaks, peak, temperature)
    masses = masses * tl.exp(-block_distances.to(tl.float32, bitcast=True))
    # Distance 0x7F800000 is that of -inf. Of tokens at distance `last` only those up to id `last_id` are left.
    last = tl.full((), 0x7F800000, tl.int32)
    last_id = tl.full((), 1 << 30, tl.int32)
    is_filtered = (top_k < vocab_size) | (top_p < 1.0) | (log_min_p > float("-inf"))
    if is_filtered:
        whole = tl.sum(masses.to(tl.float64), 0)
        farthest = _farthest(block_distances, top_k, top_p, log_min_p, whole, vocab_size, blocks)
        # The blocks where anything can be left, in order.
        is_kept = (block < blocks) & (block_distances <= farthest)
        num_kept = tl.sum(is_kept.to(tl.int32), 0)
        kept_blocks = kept_blocks_ptr + place * blocks
        tl.store(kept_blocks + tl.cumsum(is_kept.to(tl.int32), 0) - 1, block, mask=is_kept)
        tl.debug_barrier()
        last, last_id = _limits(
            row, kept_blocks, num_kept, peak, temperature, farthest, top_k, top_p, log_min_p, whole, vocab_size, BLOCK, BLOCKS
        )
        winner = _race(row, kept_blocks, num_kept, peak, temperature, last, last_id, key, vocab_size, BLOCK, BLOCKS)
    else:
        raced = tl.where(block < blocks, masses / exponential_at(key, block + BLOCK), -1.0)
        winner = tl.min(tl.where(raced == tl.max(raced, 0), block, BLOCKS_PAD), 0)
    # The second round, inside the winning block.
    token = winner * BLOCK + inside
    x = tl.load(row + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    raced = _left(_distance(x, peak, temperature), token, last, last_id) / exponential_at(key, inside)
    tl.store(tokens_ptr + place, tl.min(tl.where(raced == tl.max(raced, 0), token, vocab_size), 0).to(tl.int64))


@triton.jit
def _distance(x, peak, temperature):
    """(peak - x) / temperature >= 0, as the bits of the float: integers in the same order, 0x7F800000 for -inf."""
    return tl.div_rn(peak - x, tl.zeros_like(x) + temperature).to(tl.int32, bitcast=True)


@triton.jit
def _left(distance, token, last, last_id):
    """Weights exp(-distance) of tokens that are left, else 0."""
    is_left = (distance < last) | ((distance == last) & (token <= last_id))
    return tl.where(is_left, tl.exp(-distance.to(tl.float32, bitcast=True)), 0.0)


@triton.jit
def _farthest(block_distances, top_k, top_p, log_min_p, whole, vocab_size, blocks):
    """A distance beyond which no token can be left."""
    farthest = tl.full((), 0x7F800000, tl.int32)
    if top_k < vocab_size:
        if top_k <= blocks:  # as many blocks begin no farther than this
            low = tl.full((), 0, tl.int32)
            while low < farthest:
                middle = low + (farthest - low) // 2
                if tl.sum((block_distances <= middle).to(tl.int32), 0) >= top_k:
                    farthest = middle
                else:
                    low = middle + 1
    elif top_p < 1.0:
        # All tokens below (1 - top_p) * whole / vocab_size together are too light to be needed.
        bound = 0.001 - tl.log((1.0 - top_p) * whole / vocab_size).to(tl.float32)
        farthest = (tl.maximum(bound, 0.0) + 0.0).to(tl.int32, bitcast=True)
    else:
        farthest = (0.0 - log_min_p).to(tl.int32, bitcast=True)
    return farthest


@triton.jit
def _limits(
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
def _race(
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
        weights = _left(_distance(x, peak, temperature), token, last, last_id)
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
    return tl.where(mask, _distance(x, peak, temperature), 0x7F800001)


@triton.jit
def _match(tokens_ptr, parents_ptr, guesses_ptr, starts_ptr, num_tokens_ptr, emitted_ptr, nodes_ptr, depth):
    row = tl.program_id(0)
    start = tl.load(starts_ptr + row)
    end = tl.load(starts_ptr + row + 1)
    at = tl.full((), 0, tl.int32)
    count = tl.full((), 1, tl.int32)
    token = tl.load(tokens_ptr + start)
    lowest = token
    tl.store(emitted_ptr + row * depth, token)
    tl.store(nodes_ptr + row * depth, at)
    for place in range(start + 1, end):
        follows = (tl.load(parents_ptr + place) - start == at) & (tl.load(guesses_ptr + place).to(tl.int64) == token)
        token = tl.where(follows, tl.load(tokens_ptr + place), token)
        at = tl.where(follows, place - start, at)
        tl.store(emitted_ptr + row * depth + count, token, mask=follows)
        tl.store(nodes_ptr + row * depth + count, at, mask=follows)
        count += follows.to(tl.int32)
        lowest = tl.minimum(lowest, token)
    tl.store(num_tokens_ptr + row, tl.where(lowest < 0, 0, count))
