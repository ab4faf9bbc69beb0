"""What requests add to, scale in or forbid from their logits, for all nodes of a step at once.

Knows no requests: they are described by tensors. engine/logit_edits.py says what is meant, and in which order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import MAX_TREE_TOKENS
from .launch import ceil_div, power_of_two

_CHUNK = 2048
_LIST = 256

PATH_LENGTHS = (8, power_of_two(MAX_TREE_TOKENS))
"""Lengths of paths that kernels are built for: few, because none should be built while somebody waits."""


@dataclass(frozen=True)
class Edits:
    """Of N places. Lists are ragged: place i has ids[starts[i]:ends[i]] (int32), and places may share a list.

    Ids within a list are distinct (bans may repeat) and inside the vocabulary. All on the logits' device.
    """

    allowed_rows: Tensor  # [N] int32, row of allowed; -1 = every token is
    allowed: Tensor  # [A, ceil(V / 32)] int32, bit t % 32 of word t / 32 set for each allowed token t
    banned_ranges: Tensor  # [N, 2] int32, start and end in banned_ids
    banned_ids: Tensor
    bias_ranges: Tensor  # [N, 2] int32
    bias_ids: Tensor
    bias: Tensor  # float32, of bias_ids
    seen_ranges: Tensor  # [N, 2] int32, of penalised places: distinct tokens of prompt and output
    seen_ids: Tensor
    counts: Tensor  # float32, of seen_ids: how often each is in the output
    paths: Tensor  # [N, longest path <= MAX_TREE_TOKENS] int32, of penalised places: drafted tokens that lead to the place; -1 = none
    repetition: Tensor  # [N] float32, 1 = off
    frequency: Tensor  # [N] float32, 0 = off
    presence: Tensor  # [N] float32, 0 = off


def edit_logits(logits: Tensor, rows: Tensor, edits: Edits) -> Tensor:
    """[N, V] float32: logits [M, V] of each place's row (rows [N] int64) after its edits. Two launches."""
    vocab_size = logits.shape[1]
    out = torch.empty(len(rows), vocab_size, dtype=torch.float32, device=logits.device)
    if not len(rows):
        return out
    _copy[(len(rows), ceil_div(vocab_size, _CHUNK))](
        logits,
        rows,
        edits.allowed_rows,
        edits.allowed,
        out,
        logits.stride(0),
        edits.allowed.stride(0),
        vocab_size,
        CHUNK=_CHUNK,
        num_warps=4,
    )
    path_length = edits.paths.shape[1]
    _edit[(len(rows),)](
        out,
        edits.banned_ranges,
        edits.banned_ids,
        edits.bias_ranges,
        edits.bias_ids,
        edits.bias,
        edits.seen_ranges,
        edits.seen_ids,
        edits.counts,
        edits.paths,
        edits.repetition,
        edits.frequency,
        edits.presence,
        logits,
        rows,
        logits.stride(0),
        vocab_size,
        path_length,
        edits.allowed_rows,
        edits.allowed,
        edits.allowed.stride(0),
        PATH=next(size for size in PATH_LENGTHS if size >= path_length),
        CHUNK=_CHUNK,
        LIST=_LIST,
        num_warps=4,
    )
    return out


@triton.jit
def _copy(logits_ptr, rows_ptr, allowed_rows_ptr, allowed_ptr, out_ptr, stride, allowed_stride, vocab_size, CHUNK: tl.constexpr):
    """The logits of a place; -inf for tokens that are not allowed."""
    place = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab_size
    x = tl.load(logits_ptr + tl.load(rows_ptr + place) * stride + token, mask=inside, other=0.0).to(tl.float32)
    allowed_row = tl.load(allowed_rows_ptr + place).to(tl.int64)
    if allowed_row >= 0:
        x = tl.where(_is_allowed(allowed_ptr + allowed_row * allowed_stride, token, inside), x, float("-inf"))
    tl.store(out_ptr + place * vocab_size + token, x, mask=inside)


@triton.jit
def _is_allowed(words_ptr, token, mask):
    word = tl.load(words_ptr + token // 32, mask=mask, other=0)
    return ((word >> (token % 32)) & 1) != 0


@triton.jit(do_not_specialize=["path_length"])
def _edit(
    out_ptr,
    banned_ranges_ptr,
    banned_ids_ptr,
    bias_ranges_ptr,
    bias_ids_ptr,
    bias_ptr,
    seen_ranges_ptr,
    seen_ids_ptr,
    counts_ptr,
    paths_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    logits_ptr,
    rows_ptr,
    stride,
    vocab_size,
    path_length,
    allowed_rows_ptr,
    allowed_ptr,
    allowed_stride,
    PATH: tl.constexpr,
    CHUNK: tl.constexpr,
    LIST: tl.constexpr,
):
    """The lists of one place, kind by kind: what one kind has stored the next one reads, hence the barriers."""
    place = tl.program_id(0).to(tl.int64)
    row = out_ptr + place * vocab_size
    item = tl.arange(0, LIST)

    start = tl.load(banned_ranges_ptr + 2 * place)
    end = tl.load(banned_ranges_ptr + 2 * place + 1)
    if start < end:
        for at in range(start, end, LIST):
            token = tl.load(banned_ids_ptr + at + item, mask=at + item < end, other=0)
            tl.store(row + token, tl.full((LIST,), float("-inf"), tl.float32), mask=at + item < end)
        tl.debug_barrier()
        num_left = tl.full((), 0, tl.int32)
        for at in range(0, vocab_size, CHUNK):
            token = at + tl.arange(0, CHUNK)
            x = tl.load(row + token, mask=token < vocab_size, other=float("-inf"))
            num_left += tl.sum((x != float("-inf")).to(tl.int32), 0)
        if num_left == 0:  # rather the best allowed token than none
            original = logits_ptr + tl.load(rows_ptr + place) * stride
            allowed_row = tl.load(allowed_rows_ptr + place).to(tl.int64)
            for at in range(start, end, LIST):
                mask = at + item < end
                token = tl.load(banned_ids_ptr + at + item, mask=mask, other=0)
                if allowed_row >= 0:
                    mask = mask & _is_allowed(allowed_ptr + allowed_row * allowed_stride, token, mask)
                x = tl.load(original + token, mask=mask, other=0.0).to(tl.float32)
                tl.store(row + token, x, mask=mask)
        tl.debug_barrier()

    start = tl.load(bias_ranges_ptr + 2 * place)
    end = tl.load(bias_ranges_ptr + 2 * place + 1)
    if start < end:
        for at in range(start, end, LIST):
            mask = at + item < end
            token = tl.load(bias_ids_ptr + at + item, mask=mask, other=0)
            x = tl.load(row + token, mask=mask, other=0.0) + tl.load(bias_ptr + at + item, mask=mask, other=0.0)
            tl.store(row + token, x, mask=mask)
        tl.debug_barrier()

    start = tl.load(seen_ranges_ptr + 2 * place)
    end = tl.load(seen_ranges_ptr + 2 * place + 1)
    if start < end:
        repetition = tl.load(repetition_ptr + place)
        frequency = tl.load(frequency_ptr + place)
        presence = tl.load(presence_ptr + place)
        step = tl.arange(0, PATH)
        path = tl.load(paths_ptr + place * path_length + step, mask=step < path_length, other=-1)
        is_new = path >= 0  # and not seen before, as far as we know
        for at in range(start, end, LIST):
            mask = at + item < end
            token = tl.load(seen_ids_ptr + at + item, mask=mask, other=-2)
            is_same = token[:, None] == path[None, :]
            count = tl.load(counts_ptr + at + item, mask=mask, other=0.0) + tl.sum(is_same.to(tl.float32), 1)
            is_new = is_new & (tl.max(is_same.to(tl.int32), 0) == 0)
            _penalise(row, token, mask, count, repetition, frequency, presence)
        # Tokens that only the path has: once each, where it comes first.
        is_same = path[:, None] == path[None, :]
        is_earlier = is_same & (step[None, :] < step[:, None])
        is_new = is_new & (tl.max(is_earlier.to(tl.int32), 1) == 0)
        _penalise(row, path, is_new, tl.sum(is_same.to(tl.float32), 1), repetition, frequency, presence)


@triton.jit
def _penalise(row, token, mask, count, repetition, frequency, presence):
    x = tl.load(row + token, mask=mask, other=0.0)
    x = tl.where(x > 0.0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
    x = x - count * frequency - tl.where(count > 0.0, presence, 0.0)
    tl.store(row + token, x, mask=mask)
