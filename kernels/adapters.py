"""Adapters beside a network's weights (LoRA, Hu et al. 2021): the ops that add them, and the memory in which they come and go.

An adapter adds (x @ down.T) @ up to products of its rows alone: rows of one batch may have different ones, or none. Knows no file and no
name of an adapter: to a network they are numbered slots.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .large_pages import in_large_pages
from .layout import RaggedBatch
from .ops import GatherRows, Linear, LowRank, Op
from .program import Program, RowsOf, routers


@dataclass(frozen=True)
class AdapterRoom:
    """What a network is to have room for."""

    num_slots: int  # adapters at once
    rank: int  # the greatest of any


@dataclass(frozen=True)
class Factors:
    """What all slots add to one product, whose weights stand side by side. A weight that a slot leaves alone has zeros there."""

    down: Tensor  # [weights, slots, rank, in]
    ups: tuple[Tensor, ...]  # of each weight [slots, rank, out]
    ranks: Tensor  # [weights, slots] int32, on the host: leading rows of down and up that may be other than 0

    @property
    def num_bytes(self) -> int:
        return self.down.nbytes + sum(up.nbytes for up in self.ups)

    def added(self, rows: Tensor, slots: Tensor) -> Tensor:
        """[T, sum of out] what the adapter in slots [T] of each row adds to x @ weight.T, x [T, in] being the rows."""
        num_weights, num_slots, rank, width = self.down.shape
        is_own = slots[:, None] == torch.arange(1, num_slots + 1, device=slots.device, dtype=torch.int32)
        # All slots in one product; those of others are taken out before they can meet the row's own.
        inner = torch.mm(rows, self.down.view(-1, width).t()).view(-1, num_weights, num_slots, rank)
        inner = inner.masked_fill(~is_own[:, None, :, None], 0.0)
        return torch.cat([torch.mm(inner[:, i].flatten(1), up.view(num_slots * rank, -1)) for i, up in enumerate(self.ups)], -1)


class AdapterBank:
    """Room for the adapters of one network. Slots are numbered from 1 on; 0 means no adapter.

    Its tensors stay where they are: whoever runs the network may keep their addresses. Written between two passes.
    """

    def __init__(
        self,
        products: Iterable[tuple[str, ...]],
        shapes: Mapping[str, tuple[int, ...]],
        room: AdapterRoom,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        slices: Mapping[str, RowsOf] | None = None,
    ) -> None:
        """products: the weights of each that can be adapted, with their shapes [out, in]. dtype: of the factors. slices: see Program."""
        num_slots, rank = self.num_slots, self.rank = room.num_slots, room.rank
        self.slices: Mapping[str, RowsOf] = slices or {}
        self.shapes: dict[str, tuple[int, ...]] = {}  # of what can be adapted
        self.factors: dict[tuple[str, ...], Factors] = {}
        sizes = {names: [shapes[name] for name in names] for names in products}
        downs = [(len(size), num_slots, rank, size[0][1]) for size in sizes.values()]
        ups = [(num_slots, rank, out) for size in sizes.values() for out, _ in size]
        memory = _zeros([*downs, *ups], dtype, torch.device(device))
        found_downs, found_ups = memory[: len(downs)], iter(memory[len(downs) :])
        for (names, size), down in zip(sizes.items(), found_downs, strict=True):
            self.shapes.update(zip(names, size, strict=True))
            ranks = torch.zeros(len(size), num_slots, dtype=torch.int32)
            self.factors[names] = Factors(down, tuple(next(found_ups) for _ in size), ranks)

    @classmethod
    def of(cls, program: Program, room: AdapterRoom, dtype: torch.dtype, device: torch.device | str = "cpu") -> AdapterBank:
        """For a program's network, or for `adapted` of it."""
        return cls([op.weights for op in adaptable(program)], program.weights, room, dtype, device, program.slices)

    @property
    def num_bytes(self) -> int:
        return sum(factors.num_bytes for factors in self.factors.values())

    def put(self, slot: int, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Fill a slot. pairs: weight -> down [r, in], up [out, r], r at most `rank`; what has none is left as it is by the network."""
        assert 1 <= slot <= self.num_slots and pairs.keys() <= self.shapes.keys(), "no such slot, or weights that have no factors"
        for names, factors in self.factors.items():
            for i, name in enumerate(names):
                down, up = factors.down[i, slot - 1], factors.ups[i][slot - 1]
                down.zero_()
                up.zero_()
                factors.ranks[i, slot - 1] = 0
                if name in pairs:
                    its_down, its_up = pairs[name]
                    size = len(its_down)
                    down[:size].copy_(its_down)
                    up[:size].copy_(its_up.t())
                    factors.ranks[i, slot - 1] = size


def adapter_bytes(program: Program, room: AdapterRoom, dtype: torch.dtype) -> int:
    """That a bank of the program's would take."""
    numbers = sum(sum(program.weights[name]) for op in adaptable(program) for name in op.weights)
    return numbers * room.num_slots * room.rank * dtype.itemsize


def _zeros(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """One for each shape; on the host side by side in large pages, for every pass reads them."""
    if device.type != "cpu":
        return [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
    sizes = [-(-math.prod(shape) * dtype.itemsize // 64) * 64 for shape in shapes]
    parts = in_large_pages(sum(sizes)).zero_().split_with_sizes(sizes)
    return [part.view(dtype)[: math.prod(shape)].view(shape) for part, shape in zip(parts, shapes, strict=True)]


def slots_of_tokens(batch: RaggedBatch) -> Tensor | None:
    """[T] int32, which slot's adapter each token has, 0 being none; None: no row has any. Not waited for."""
    return None if batch.adapters is None else batch.adapters[batch.rows_of_tokens]


def adaptable(program: Program) -> list[Linear]:
    """The products that adapters may add to: all over every token, but for those that choose experts."""
    decide = routers(program.ops)
    of_scores: set[str] = set()  # buffers with a row for each of logits_indices
    found: list[Linear] = []
    for op in program.ops:
        if isinstance(op, GatherRows) or any(name in of_scores for name in op.inputs):
            of_scores.update(op.outputs)
        elif isinstance(op, Linear) and op.outputs[0] not in decide:
            found.append(op)
    return found


def adapted(program: Program) -> Program:
    """The network with what adapters add: each product takes it as its residual, the product's own residual among it."""
    found = {id(op) for op in adaptable(program)}
    ops: list[Op] = []
    for op in program.ops:
        if isinstance(op, Linear) and id(op) in found:
            added = f"{op.outputs[0]}+adapter"
            ops.append(LowRank(op.inputs, (added,), op.weights))
            op = replace(op, inputs=(op.inputs[0], added))
        ops.append(op)
    return replace(program, ops=tuple(ops))
