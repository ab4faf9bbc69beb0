"""Which experts the rows of a pass have, and the rows of each expert side by side. The host learns nothing of it.

Routing: Shazeer et al. 2017. A row and one of its experts are a visit, number row * top + rank.
"""

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


@dataclass(frozen=True)
class Router:
    """How scores become experts and weights, as `ops.Experts` says."""

    top: int
    renormalise: bool
    is_sigmoid: bool = False
    correction: Tensor | None = None  # [experts] float32
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    scales: Tensor | None = None  # [experts] float32


def route(logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """logits [T, experts] -> the `top` experts of each row int32, of equals the first, and their weights float32, [T, top].

    A row with a NaN has some experts, and weights that are NaN.
    """
    top = router.top
    rows, experts = logits.shape
    chosen = torch.empty(rows, top, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, top, dtype=torch.float32, device=logits.device)
    if rows:
        block = power_of_two(experts)
        _route[(rows,)](
            logits, router.correction, router.scales, chosen, weights, logits.stride(0), experts, router.scale, TOP=top,
            RENORMALISE=router.renormalise, IS_SIGMOID=router.is_sigmoid, NUM_GROUPS=router.num_groups, TOP_GROUPS=router.top_groups,
            BLOCK=block, RANKS=power_of_two(top), num_warps=warps_for(block), **launch_options(logits.device),
        )
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
        )
    return Visits(order, tiles, num_tiles, tile_rows)


@triton.jit
def _route(
    logits_ptr, correction_ptr, scales_ptr, chosen_ptr, weights_ptr, stride, experts, scale,
    TOP: tl.constexpr, RENORMALISE: tl.constexpr, IS_SIGMOID: tl.constexpr, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr, RANKS: tl.constexpr, EARLY: tl.constexpr,
):
    await_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    rank = tl.arange(0, RANKS)
    is_free = expert < experts
    x = tl.load(logits_ptr + row * stride + expert, mask=is_free, other=float("-inf")).to(tl.float32)
    spoiler = tl.sum(tl.where(is_free, x * 0.0, 0.0), 0)  # one that is not a number anywhere spoils the row
    BY_LOGITS: tl.constexpr = not IS_SIGMOID and correction_ptr is None and TOP_GROUPS == NUM_GROUPS
    if IS_SIGMOID:
        score = tl.sigmoid(x)
    else:
        score = tl.where(is_free, tl.exp(x - tl.max(tl.where(x != x, float("-inf"), x), 0)), 0.0)
        if not (BY_LOGITS and RENORMALISE):
            score /= tl.sum(score, 0)
    key = x if BY_LOGITS else score
    if correction_ptr is not None:
        key += tl.load(correction_ptr + expert, mask=is_free, other=0.0)
    key = tl.where(key != key, float("-inf"), key)
    if TOP_GROUPS < NUM_GROUPS:
        group = expert // (experts // NUM_GROUPS)
        best_two = tl.full((BLOCK,), float("-inf"), tl.float32)  # of each expert's group, together
        for i in tl.static_range(NUM_GROUPS):
            first = tl.max(tl.where(group == i, key, float("-inf")), 0)
            found = tl.min(tl.where((group == i) & (key == first), expert, BLOCK), 0)
            second = tl.max(tl.where((group == i) & (expert != found), key, float("-inf")), 0)
            best_two = tl.where(group == i, first + second, best_two)
        is_left = is_free
        for _ in tl.static_range(TOP_GROUPS):
            best = tl.max(tl.where(is_left, best_two, float("-inf")), 0)
            is_left = is_left & (group != tl.min(tl.where(is_left & (best_two == best), group, BLOCK), 0))
        is_free = is_free & (is_left == 0)
    total = spoiler if RENORMALISE else spoiler + 1.0
    chosen = tl.zeros((RANKS,), tl.int32)
    weights = tl.zeros((RANKS,), tl.float32)
    for i in tl.static_range(TOP):
        best = tl.max(tl.where(is_free, key, float("-inf")), 0)
        found = tl.min(tl.where(is_free & (key == best), expert, BLOCK), 0)
        weight = tl.sum(tl.where(expert == found, score, 0.0), 0)
        if RENORMALISE:
            total += weight
        chosen = tl.where(rank == i, found, chosen)
        weights = tl.where(rank == i, weight, weights)
        is_free = is_free & (expert != found)
    tl.store(chosen_ptr + row * TOP + rank, chosen, mask=rank < TOP)
    weights = weights / total * scale
    if scales_ptr is not None:
        weights *= tl.load(scales_ptr + chosen, mask=rank < TOP, other=0.0)
    tl.store(weights_ptr + row * TOP + rank, weights, mask=rank < TOP)


@triton.jit(do_not_specialize=["visits"])
def _group(
    chosen_ptr, order_ptr, tiles_ptr, num_tiles_ptr, visits, experts,
    TILE_ROWS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):
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
