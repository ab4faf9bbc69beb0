"""A batch of the device put into one of fixed size: `StaticBatch.take` of kernels/static_batch.py in one launch, and no wait.

A program does one of the batch's tensors, or a piece of one of its block tables.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import RaggedBatch
from .launch import ceil_div

_TENSORS = tl.constexpr(10)
_LANES = 128
_BLOCKS = 1024  # of a table, that a program copies


def take(static: RaggedBatch, batch: RaggedBatch) -> None:
    """Both without states. What static has no room for is left out: adapters, and first places."""
    rows, width = len(batch.seq_lens), min(batch.block_tables.shape[1], static.block_tables.shape[1])
    firsts, all_firsts = _optional(static.first_places, static.seq_lens)
    adapters, all_adapters = _optional(static.adapters, static.seq_lens)
    its_firsts, num_firsts = _optional(batch.first_places, batch.seq_lens)
    its_adapters, num_adapters = _optional(batch.adapters, batch.seq_lens)
    pieces = ceil_div(width, _BLOCKS)
    _take[(_TENSORS.value + rows * pieces,)](
        static.token_ids, static.positions, static.slot_mapping, static.tree_mask, static.logits_indices, static.seq_lens,
        static.num_causal, firsts, adapters, static.query_start_loc, static.block_tables,
        batch.token_ids, batch.positions, batch.slot_mapping, batch.tree_mask, batch.logits_indices, batch.seq_lens,
        batch.num_causal, its_firsts, its_adapters, batch.query_start_loc, batch.block_tables,
        len(static.token_ids), len(static.logits_indices), len(static.seq_lens), all_firsts, all_adapters, len(batch.token_ids),
        len(batch.logits_indices), rows, num_firsts, num_adapters, width, pieces, static.block_tables.stride(0),
        batch.block_tables.stride(0), LANES=_LANES, BLOCKS=_BLOCKS, num_warps=1,
    )


def warm_up(device: torch.device) -> None:
    """Have it compiled now, so that no request waits for it."""
    long, narrow = (torch.zeros(1, dtype=dtype, device=device) for dtype in (torch.int64, torch.int32))
    starts, tables = torch.zeros(2, dtype=torch.int32, device=device), torch.zeros(1, 1, dtype=torch.int32, device=device)
    batch = RaggedBatch(long, long, long, starts, narrow, tables, narrow, long, long, long[:0], 1)
    take(batch, batch)


def _optional(tensor: Tensor | None, other: Tensor) -> tuple[Tensor, int]:
    """And how much of it there is: of what is not there nothing is read or written, and no kernel of its own is built."""
    return (other, 0) if tensor is None else (tensor, len(tensor))


@triton.jit(
    do_not_specialize=[
        "all_tokens", "all_scores", "all_rows", "all_firsts", "all_adapters", "num_tokens", "num_scores", "num_rows", "num_firsts",
        "num_adapters", "width", "pieces", "stride", "its_stride",
    ]
)
def _take(
    tokens_ptr, positions_ptr, slots_ptr, mask_ptr, scores_ptr, lengths_ptr, causal_ptr, firsts_ptr, adapters_ptr, starts_ptr, tables_ptr,
    its_tokens_ptr, its_positions_ptr, its_slots_ptr, its_mask_ptr, its_scores_ptr, its_lengths_ptr, its_causal_ptr, its_firsts_ptr,
    its_adapters_ptr, its_starts_ptr, its_tables_ptr, all_tokens, all_scores, all_rows, all_firsts, all_adapters, num_tokens, num_scores,
    num_rows, num_firsts, num_adapters, width, pieces, stride, its_stride, LANES: tl.constexpr, BLOCKS: tl.constexpr,
):
    program = tl.program_id(0)
    if program >= _TENSORS:
        row = (program - _TENSORS) // pieces
        block = (program - _TENSORS) % pieces * BLOCKS + tl.arange(0, BLOCKS)
        value = tl.load(its_tables_ptr + row.to(tl.int64) * its_stride + block, mask=block < width)
        tl.store(tables_ptr + row.to(tl.int64) * stride + block, value, mask=block < width)
    elif program == 0:
        _put(tokens_ptr, its_tokens_ptr, all_tokens, num_tokens, 0, LANES)
    elif program == 1:
        _put(positions_ptr, its_positions_ptr, all_tokens, num_tokens, 0, LANES)
    elif program == 2:
        _put(slots_ptr, its_slots_ptr, all_tokens, num_tokens, -1, LANES)
    elif program == 3:
        _put(mask_ptr, its_mask_ptr, all_tokens, num_tokens, 0, LANES)
    elif program == 4:
        _put(scores_ptr, its_scores_ptr, all_scores, num_scores, 0, LANES)
    elif program == 5:
        _put(lengths_ptr, its_lengths_ptr, all_rows, num_rows, 0, LANES)
    elif program == 6:
        _put(causal_ptr, its_causal_ptr, all_rows, num_rows, 0, LANES)
    elif program == 7:
        _put(firsts_ptr, its_firsts_ptr, all_firsts, num_firsts, 0, LANES)
    elif program == 8:
        _put(adapters_ptr, its_adapters_ptr, all_adapters, num_adapters, 0, LANES)
    elif program == 9:
        _put(starts_ptr, its_starts_ptr, all_rows + 1, num_rows + 1, tl.load(its_starts_ptr + num_rows), LANES)


@triton.jit
def _put(memory_ptr, values_ptr, size, count, padding, LANES: tl.constexpr):
    for base in range(0, size, LANES):
        at = base + tl.arange(0, LANES)
        tl.store(memory_ptr + at, tl.load(values_ptr + at, mask=at < count, other=padding), mask=at < size)
