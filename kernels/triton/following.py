"""The pass behind a step, laid out on a GPU behind the walk that says where it is: kernels/following.py in one launch, and no wait.

A program does one row.
"""

# a launch takes options that are no parameters
# pyright: reportCallIssue=false
from __future__ import annotations

from array import array

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..following import Follower, Followers
from ..host_memory import host_memory
from ..layout import RaggedBatch
from .launcher import Launcher

_LANES = 32
_BLOCKS = 512  # of a table, at once
_EVEN = 16  # numbers: what lies behind so many is aligned as Triton likes it


def laid_out(followers: Followers, answer: Tensor, guesses: Tensor | None, heard: Tensor | None = None) -> RaggedBatch:
    """As the reference, on the device of answer. heard: where token ids and positions are written, too, flat int32."""
    num_tokens, (num_rows, width), device = followers.num_tokens, followers.tables.shape, answer.device
    by_token = torch.empty(5, even(num_tokens), dtype=torch.int64, device=device)
    narrow = torch.empty(4, even(num_rows + 1), dtype=torch.int32, device=device)
    tables = torch.empty(num_rows, width, dtype=torch.int32, device=device)
    drawn = torch.empty(followers.num_drawn, dtype=torch.int64, device=device) if followers.num_drawn else by_token[0, :0]
    chains = by_token if guesses is None else guesses  # which nobody reads then
    with host_memory(device).lent(followers.values, followers.tables) as (numbers, (_, first_table)):
        _launch(
            device, (num_rows,), numbers, first_table, answer, chains, by_token, narrow, tables, drawn, heard, num_rows, num_tokens, width,
            answer.shape[1], chains.stride(0), by_token.shape[1], narrow.shape[1], followers.block_size, followers.vocab_size,
        )  # fmt: skip
    tokens, positions, slots, tree_mask, every = by_token[:, :num_tokens]
    starts, seq_lens, sizes, adapters = narrow
    return RaggedBatch(
        token_ids=tokens,
        positions=positions,
        slot_mapping=slots,
        query_start_loc=starts[: num_rows + 1],
        seq_lens=seq_lens[:num_rows],
        block_tables=tables,
        num_causal=sizes[:num_rows],
        tree_mask=tree_mask,
        logits_indices=every,
        full_logits=drawn,
        block_size=followers.block_size,
        adapters=adapters[:num_rows] if followers.has_adapters else None,
    )


def even(count: int) -> int:
    return triton.cdiv(count, _EVEN) * _EVEN


def warm_up(device: torch.device) -> None:
    """Have it compiled now, so that no request waits for it."""
    followers = Followers.of([Follower(0, 1, 0, 1, array("i", (0,)), False)], 16, 2)
    heard = host_memory(device).slot(4)
    answer, guesses = torch.ones(1, 5, dtype=torch.int32, device=device), torch.zeros(1, 1, dtype=torch.int64, device=device)
    laid_out(followers, answer, guesses, heard.numbers)
    heard.sent()


@triton.jit
def copy_table(to_ptr, from_ptr, row, width, BLOCKS: tl.constexpr):
    """A row's, from where the host has it."""
    for base in range(0, width, BLOCKS):
        block = base + tl.arange(0, BLOCKS)
        place = row.to(tl.int64) * width + block
        tl.store(to_ptr + place, tl.load(from_ptr + place, mask=block < width, other=0), mask=block < width)


@triton.jit(
    do_not_specialize=[
        "first_table", "num_rows", "num_tokens", "width", "answer_stride", "guess_stride", "token_stride", "row_stride", "block_size",
        "vocab_size",
    ]
)  # fmt: skip
def _lay_out(
    numbers_ptr, first_table, answer_ptr, guesses_ptr, by_token_ptr, by_row_ptr, own_tables_ptr, drawn_ptr, heard_ptr, num_rows,
    num_tokens, width, answer_stride, guess_stride, token_stride, row_stride, block_size, vocab_size, LANES: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    values, tables_ptr = numbers_ptr + row, numbers_ptr + first_table
    answer = answer_ptr + tl.load(values) * answer_stride
    length, count, begin = tl.load(values + num_rows), tl.load(values + 3 * num_rows), tl.load(values + 4 * num_rows)
    chain = guesses_ptr + tl.load(values + 2 * num_rows).to(tl.int64) * guess_stride
    adapter, first_drawn = tl.load(values + 5 * num_rows), tl.load(values + 6 * num_rows)
    accepted = tl.maximum(tl.load(answer) - 1, 0)
    newest = length + accepted
    said = tl.load(answer + 1 + accepted).to(tl.int64)
    lane = tl.arange(0, LANES)
    for base in range(0, count + 1, LANES):
        nth = base + lane
        inside = nth <= count
        guess = tl.load(chain + nth - 1, mask=inside & (nth > 0), other=0).to(tl.int64)
        token = tl.where(nth > 0, guess, said)
        token = tl.minimum(tl.maximum(token, 0), vocab_size - 1)
        position = newest + nth
        block = tl.load(tables_ptr + row * width + position // block_size, mask=inside, other=0).to(tl.int64)
        out = by_token_ptr + begin + nth
        tl.store(out, token, mask=inside)
        tl.store(out + token_stride, position.to(tl.int64), mask=inside)
        tl.store(out + 2 * token_stride, block * block_size + position % block_size, mask=inside)
        tl.store(out + 3 * token_stride, tl.zeros_like(token), mask=inside)
        tl.store(out + 4 * token_stride, (begin + nth).to(tl.int64), mask=inside)
        tl.store(drawn_ptr + first_drawn + nth, (begin + nth).to(tl.int64), mask=inside & (first_drawn >= 0))
        if heard_ptr is not None:
            tl.store(heard_ptr + begin + nth, token.to(tl.int32), mask=inside)
            tl.store(heard_ptr + num_tokens + begin + nth, position, mask=inside)
    tl.store(by_row_ptr + row, begin)
    tl.store(by_row_ptr + num_rows, num_tokens)  # all programs say so
    tl.store(by_row_ptr + row_stride + row, newest + count + 1)
    tl.store(by_row_ptr + 2 * row_stride + row, count + 1)
    tl.store(by_row_ptr + 3 * row_stride + row, adapter)
    copy_table(own_tables_ptr, tables_ptr, row, width, BLOCKS)


_launch = Launcher(_lay_out, num_warps=1, LANES=_LANES, BLOCKS=_BLOCKS)
