"""Causal convolutions over ragged rows in Triton: each token with those just before it, wherever they are.

One launch a pass finds where they are, for all layers alike; one a layer convolves, and writes states and guesses. Nothing in them
is read on the host, and grids depend on padded sizes alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import RaggedBatch, RowStates
from .activations import function_of
from .early_launch import await_inputs, launch_options
from .launch import ceil_div

_COLUMNS = 256

_HEAD = tl.constexpr(3)  # numbers of a record before its entries
_GUESSES = tl.constexpr(64)  # entries below -1 that stand for guesses, those further down for numbers of the state


def trace(batch: RaggedBatch, states: RowStates, past: int) -> Tensor:
    """[T + 2 R, 3 + past] int32, where each token finds the `past` entries before it, and each row those of its new state and its copy.

    A record is (source slot, slot that is written, guess number there), then entries, newest first: a flat token; -1 = nothing, which
    counts as 0; -2 - i = guess i kept in the source; -66 - i = number i of the source's state. Tokens' slots are those of guesses that
    are kept, the others' those of states; -1 = written nowhere. All tensors are on the device.
    """
    tokens, rows = len(batch.token_ids), len(batch.seq_lens)
    records = torch.empty(tokens + 2 * rows, 3 + past, dtype=torch.int32, device=batch.token_ids.device)
    if len(records):
        _trace[(len(records),)](
            batch.query_start_loc, batch.seq_lens, batch.num_causal, batch.tree_mask, states.sources, states.targets, states.accepted,
            states.num_known, states.copy_places, states.copy_slots, records, tokens, rows,
            PAST=past, num_warps=1, **launch_options(records.device),
        )
    return records


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, function: str, records: Tensor, states: Tensor, guesses: Tensor) -> Tensor:
    """function(convolution of x [T, width] by weight [taps, width] + bias [width]); a new tensor. function "" = none.

    records: `trace` with past = taps - 1. states [slots, past * width] float32, oldest first, and guesses [slots, G, width] of this layer:
    sources are read, targets and copies written.
    """
    (tokens, width), taps = x.shape, weight.shape[0]
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    if tokens:
        _convolve[(len(records), ceil_div(width, _COLUMNS))](
            x, weight, bias, records, states, guesses, out, x.stride(0), tokens, width, guesses.shape[1],
            PAST=taps - 1, HAS_BIAS=bias is not None, FUNCTION=function, BLOCK=_COLUMNS, num_warps=2, **launch_options(x.device),
        )
    return out


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _trace(
    starts_ptr, ends_ptr, causal_ptr, mask_ptr, sources_ptr, targets_ptr, accepted_ptr, known_ptr, copy_places_ptr, copy_slots_ptr,
    records_ptr, num_tokens, num_rows, PAST: tl.constexpr, EARLY: tl.constexpr,
):
    await_inputs(EARLY)
    job = tl.program_id(0)
    is_token, is_copy = job < num_tokens, job >= num_tokens + num_rows
    row = tl.full((), 0, tl.int32)
    if is_token:
        # The first row that ends behind it; padding has none.
        high = row + num_rows
        while row < high:
            middle = (row + high) // 2
            if tl.load(starts_ptr + middle + 1) <= job:
                row = middle + 1
            else:
                high = middle
    else:
        row = row + (job - num_tokens) % num_rows
    there = row < num_rows
    row = tl.minimum(row, num_rows - 1)
    start = tl.load(starts_ptr + row)
    length = tl.load(starts_ptr + row + 1) - start
    there = there & (length > 0)
    known, num_causal = tl.minimum(tl.load(known_ptr + row), length), tl.load(causal_ptr + row)
    source, target = tl.load(sources_ptr + row), tl.load(targets_ptr + row)
    bits = tl.arange(0, 64).to(tl.int64)
    accepted = ((tl.load(accepted_ptr + row) >> bits) & 1).to(tl.int32)
    num_accepted = tl.sum(accepted, 0)
    behind = num_accepted - tl.cumsum(accepted, 0)  # how many accepted guesses come after each
    # The row's new tokens are numbered from 0, and what came before them backwards from -1.
    last = tl.where(is_copy, tl.load(copy_places_ptr + row) - (tl.load(ends_ptr + row) - length), known) - 1
    node = tl.where(is_token, job - start, last + 1)
    slot = target
    if is_token:
        slot = tl.where(node >= known, target, -1)
    if is_copy:
        slot = tl.where((last >= -num_accepted) & (last < known), tl.load(copy_slots_ptr + row), -1)
    record = records_ptr + job.to(tl.int64) * (_HEAD + PAST)
    tl.store(record, tl.where(there, source, -1))
    tl.store(record + 1, tl.where(there, slot, -1))
    tl.store(record + 2, tl.where(is_token, node - known, 0))
    for i in tl.static_range(PAST):
        is_tree = there & is_token & (node >= tl.maximum(num_causal, known))
        mask = tl.load(mask_ptr + start + node, mask=is_tree, other=0)
        parent = tl.max(tl.where(((mask >> bits) & 1 != 0) & (bits < node - num_causal), bits, -1), 0).to(tl.int32)
        node = tl.where(is_tree, num_causal + parent, node - 1)
        age = -1 - node
        guess = tl.sum(tl.where((accepted != 0) & (behind == age), bits, 0), 0).to(tl.int32)
        number = PAST - 1 - (age - num_accepted)
        entry = tl.where(age < num_accepted, -2 - guess, -2 - number - _GUESSES)
        entry = tl.where(node >= 0, start + node, tl.where(source >= 0, entry, -1))
        tl.store(record + _HEAD + i, tl.where(there, entry, -1))


@triton.jit(do_not_specialize=["num_tokens"])
def _convolve(
    x_ptr, weight_ptr, bias_ptr, records_ptr, states_ptr, guesses_ptr, out_ptr, x_stride, num_tokens, width, num_guesses,
    PAST: tl.constexpr, HAS_BIAS: tl.constexpr, FUNCTION: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):
    await_inputs(EARLY)
    job = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    record = records_ptr + job.to(tl.int64) * (_HEAD + PAST)
    source, slot = tl.load(record).to(tl.int64), tl.load(record + 1).to(tl.int64)
    kept, state = guesses_ptr + source * num_guesses * width, states_ptr + source * PAST * width
    if job < num_tokens:
        token = job.to(tl.int64)
        x = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0)
        y = x.to(tl.float32) * tl.load(weight_ptr + PAST * width + column, mask=inside, other=0.0).to(tl.float32)
        for i in tl.static_range(PAST):
            before = _entry(tl.load(record + _HEAD + i), x_ptr, x_stride, kept, state, column, inside, width)
            y += before * tl.load(weight_ptr + (PAST - 1 - i) * width + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            y += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + token * width + column, function_of(y, FUNCTION).to(out_ptr.dtype.element_ty), mask=inside)
        if (slot >= 0) & (PAST > 0):
            place = slot * num_guesses + tl.load(record + 2)
            tl.store(guesses_ptr + place * width + column, x.to(guesses_ptr.dtype.element_ty), mask=inside)
    else:
        if slot >= 0:
            for i in tl.static_range(PAST):
                value = _entry(tl.load(record + _HEAD + i), x_ptr, x_stride, kept, state, column, inside, width)
                tl.store(states_ptr + (slot * PAST + PAST - 1 - i) * width + column, value, mask=inside)


@triton.jit
def _entry(entry, x_ptr, x_stride, kept_ptr, state_ptr, column, inside, width):
    """[BLOCK] float32"""
    entry = entry.to(tl.int64)
    guess = -2 - entry
    number = guess - _GUESSES
    is_guess = (guess >= 0) & (number < 0)
    new = tl.load(x_ptr + entry * x_stride + column, mask=inside & (entry >= 0), other=0.0).to(tl.float32)
    kept = tl.load(kept_ptr + guess * width + column, mask=inside & is_guess, other=0.0).to(tl.float32)
    return new + kept + tl.load(state_ptr + number * width + column, mask=inside & (number >= 0), other=0.0)
