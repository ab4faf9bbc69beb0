"""The pass behind a step, laid out on a GPU behind the walk that says where it is: kernels/following.py in one launch, and no wait.

A program does one row.
"""

from __future__ import annotations

from array import array

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..following import Follower, Followers
from ..layout import RaggedBatch

_VALUES = tl.constexpr(5)  # of each row: answer, length, chain, count, first flat token
_LANES = 32
_EVEN = 16  # numbers: what lies behind so many is aligned as Triton likes it


def laid_out(followers: Followers, answer: Tensor, guesses: Tensor | None) -> RaggedBatch:
    """As the reference, on the device of answer."""
    num_tokens, (num_rows, width) = len(followers.every), followers.tables.shape
    by_token = torch.empty(4, triton.cdiv(num_tokens, _EVEN) * _EVEN, dtype=torch.int64, device=answer.device)
    seq_lens = torch.empty(num_rows, dtype=torch.int32, device=answer.device)
    chains = by_token if guesses is None else guesses  # which nobody reads then
    _lay_out[(num_rows,)](
        followers.values, followers.tables, answer, chains, by_token, seq_lens, width, answer.shape[1], chains.stride(0),
        by_token.shape[1], followers.block_size, followers.vocab_size, LANES=_LANES, num_warps=1,
    )
    tokens, positions, slots, tree_mask = by_token[:, :num_tokens]
    return followers.batch(tokens, positions, slots, seq_lens, tree_mask)


def warm_up(device: torch.device) -> None:
    """Have it compiled now, so that no request waits for it."""
    followers = Followers.of([Follower(0, 1, 0, 1, array("i", (0,)), False)], device, 16, 2)
    laid_out(followers, torch.ones(1, 5, dtype=torch.int32, device=device), torch.zeros(1, 1, dtype=torch.int64, device=device))


@triton.jit(do_not_specialize=["width", "answer_stride", "guess_stride", "token_stride", "block_size", "vocab_size"])
def _lay_out(
    values_ptr, tables_ptr, answer_ptr, guesses_ptr, by_token_ptr, seq_lens_ptr, width, answer_stride, guess_stride, token_stride,
    block_size, vocab_size, LANES: tl.constexpr,
):
    row = tl.program_id(0)
    values = values_ptr + row * _VALUES
    answer = answer_ptr + tl.load(values) * answer_stride
    chain = guesses_ptr + tl.load(values + 2).to(tl.int64) * guess_stride
    count, begin = tl.load(values + 3), tl.load(values + 4)
    accepted = tl.maximum(tl.load(answer) - 1, 0)
    newest = tl.load(values + 1) + accepted
    said = tl.load(answer + 1 + accepted).to(tl.int64)
    lane = tl.arange(0, LANES)
    for base in range(0, count + 1, LANES):
        nth = base + lane
        inside = nth <= count
        guess = tl.load(chain + nth - 1, mask=inside & (nth > 0), other=0).to(tl.int64)
        token = tl.where(nth > 0, guess, said)
        position = newest + nth
        block = tl.load(tables_ptr + row * width + position // block_size, mask=inside, other=0).to(tl.int64)
        out = by_token_ptr + begin + nth
        tl.store(out, tl.minimum(tl.maximum(token, 0), vocab_size - 1), mask=inside)
        tl.store(out + token_stride, position.to(tl.int64), mask=inside)
        tl.store(out + 2 * token_stride, block * block_size + position % block_size, mask=inside)
        tl.store(out + 3 * token_stride, tl.zeros_like(token), mask=inside)
    tl.store(seq_lens_ptr + row, newest + count + 1)
