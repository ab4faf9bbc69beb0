"""Which experts the rows of a pass have, and the rows of each expert side by side. The host learns nothing of it.

Routing: Shazeer et al. 2017. A row and one of its experts are a visit, number row * top + rank.
"""

# a launch takes options that are no parameters
# pyright: reportCallIssue=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .early_launch import await_inputs, launch_options
from .launch import power_of_two, warps_for

_BLOCK = 1024


@dataclass(frozen=True)
class Visits:
    """Of all rows, those of an expert together and in the order of their rows; and how they are cut into tiles."""

    order: Tensor  # [visits] int32
    tiles: Tensor  # [most tiles, 3] int32: its expert, where it begins in `order`, where its expert ends there
    num_tiles: Tensor  # [1] int32
    tile_rows: int

    @property
    def most_tiles(self) -> int:
        return len(self.tiles)


def route(logits: Tensor, top: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """logits [T, experts] -> the `top` experts of each row int32, of equals the first, and their weights float32, [T, top].

    Weights are a softmax over all; renormalise: over these. A row with a NaN has some experts, and weights that are NaN.
    """
    rows, experts = logits.shape
    chosen = torch.empty(rows, top, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, top, dtype=torch.float32, device=logits.device)
    if rows:
        block = power_of_two(experts)
        _route[(rows,)](
            logits, chosen, weights, logits.stride(0), experts, TOP=top, RENORMALISE=renormalise, BLOCK=block,
            RANKS=power_of_two(top), num_warps=warps_for(block), **launch_options(logits.device),
        )  # fmt: skip
    return chosen, weights


def group(chosen: Tensor, experts: int, tile_rows: int) -> Visits:
    """chosen [T, top], each an expert's number -> the visits by experts, in tiles of tile_rows."""
    visits, device = chosen.numel(), chosen.device
    most_tiles = visits // tile_rows + min(experts, visits)
    order = torch.empty(visits, dtype=torch.int32, device=device)
    tiles = torch.empty(most_tiles, 3, dtype=torch.int32, device=device)
    num_tiles = torch.empty(1, dtype=torch.int32, device=device)
    if visits:
        _group[(experts,)](
            chosen, order, tiles, num_tiles, visits, experts, TILE_ROWS=tile_rows, BINS=power_of_two(experts + 1), BLOCK=_BLOCK,
            num_warps=4, **launch_options(device),
        )  # fmt: skip
    return Visits(order, tiles, num_tiles, tile_rows)


@triton.jit
def _route(
    logits_ptr, chosen_ptr, weights_ptr, stride, experts,
    TOP: tl.constexpr, RENORMALISE: tl.constexpr, BLOCK: tl.constexpr, RANKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    rank = tl.arange(0, RANKS)
    is_free = expert < experts
    x = tl.load(logits_ptr + row * stride + expert, mask=is_free, other=float("-inf")).to(tl.float32)
    key = tl.where(x != x, float("-inf"), x)
    greatest = tl.max(key, 0)
    if RENORMALISE:  # one that is not a number anywhere spoils the row, as a softmax over all would
        total = tl.sum(tl.where(is_free, x * 0.0, 0.0), 0)
    else:
        total = tl.sum(tl.where(is_free, tl.exp(x - greatest), 0.0), 0)
    chosen = tl.zeros((RANKS,), tl.int32)
    weights = tl.zeros((RANKS,), tl.float32)
    for i in tl.static_range(TOP):
        best = tl.max(tl.where(is_free, key, float("-inf")), 0)
        found = tl.min(tl.where(is_free & (key == best), expert, BLOCK), 0)
        weight = tl.exp(best - greatest)
        if RENORMALISE:
            total += weight
        chosen = tl.where(rank == i, found, chosen)
        weights = tl.where(rank == i, weight, weights)
        is_free = is_free & (expert != found)
    tl.store(chosen_ptr + row * TOP + rank, chosen, mask=rank < TOP)
    tl.store(weights_ptr + row * TOP + rank, weights / total, mask=rank < TOP)


@triton.jit(do_not_specialize=["visits"])
def _group(
    chosen_ptr, order_ptr, tiles_ptr, num_tiles_ptr, visits, experts,
    TILE_ROWS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program an expert: it counts everybody's visits to know where its own begin, and lists these."""
    await_inputs(EARLY)
    expert = tl.program_id(0)
    some = tl.arange(0, BLOCK)
    counts = tl.zeros((BINS,), tl.int32)
    for first in range(0, visits, BLOCK):
        chosen = tl.load(chosen_ptr + first + some, mask=first + some < visits, other=experts)
        counts += tl.histogram(chosen, BINS)
    name = tl.arange(0, BINS)
    counts = tl.where(name < experts, counts, 0)
    tiles = (counts + TILE_ROWS - 1) // TILE_ROWS
    start = tl.sum(tl.where(name < expert, counts, 0), 0)
    end = start + tl.sum(tl.where(name == expert, counts, 0), 0)
    tile = tl.sum(tl.where(name < expert, tiles, 0), 0)
    if expert == 0:
        tl.store(num_tiles_ptr, tl.sum(tiles, 0))
    for begin in range(start, end, TILE_ROWS):
        tl.store(tiles_ptr + 3 * tile, expert)
        tl.store(tiles_ptr + 3 * tile + 1, begin)
        tl.store(tiles_ptr + 3 * tile + 2, end)
        tile += 1
    place = start - 1
    for first in range(0, visits, BLOCK):
        chosen = tl.load(chosen_ptr + first + some, mask=first + some < visits, other=experts)
        is_mine = chosen == expert
        nth = tl.cumsum(is_mine.to(tl.int32), 0)
        tl.store(order_ptr + place + nth, first + some, mask=is_mine)
        place += tl.max(nth, 0)
