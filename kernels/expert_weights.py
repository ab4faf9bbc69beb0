"""The weights of a layer's experts, one behind the other, for kernels that find out on the device which of them a row has.

Number formats are those of other products: as they are, 8-bit floats (fp8.py) or 4 bits (int4.py). Knows no program and no kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .execution import Quantization
from .fp8 import Fp8Matrix
from .int4 import Int4Matrix


@dataclass(frozen=True)
class ExpertWeights:
    """Weights [out, in] of `count` experts."""

    values: Tensor  # [count, out, in], wide or e4m3; 4 bits: [count, tiles, out, 16] int32, see Int4Matrix.words
    scales: Tensor | None  # [count, out] float32 of narrow ones
    group_scales: Tensor | None  # 4 bits: [count, tiles, out] int32, see Int4Matrix.group_scales
    outputs: int
    depth: int  # inputs
    bias: Tensor | None = None  # [count, out]

    @classmethod
    def of(
        cls, count: int, weight: Callable[[int], Tensor], quantization: Quantization | None, bias: Tensor | None = None
    ) -> ExpertWeights:
        """weight: [out, in] of an expert by its number; it is asked for one after the other, and none is kept."""
        outputs, depth = weight(0).shape
        stacks = [part.new_empty(count, *part.shape) for part in _parts(weight(0), quantization)]
        for expert in range(count):
            for stack, part in zip(stacks, _parts(weight(expert), quantization), strict=True):
                stack[expert] = part
        values, *narrow = stacks
        scales, group_scales = (*narrow, None, None)[:2]
        return cls(values, scales, group_scales, outputs, depth, bias)

    @property
    def count(self) -> int:
        return len(self.values)

    @property
    def is_int4(self) -> bool:
        return self.group_scales is not None

    def weight(self, expert: int) -> Tensor:
        """[out, in] float32 of one, as every product means it."""
        if self.group_scales is not None and self.scales is not None:
            return Int4Matrix(self.values[expert], self.group_scales[expert], self.scales[expert], self.depth).weight()
        wide = self.values[expert].float()
        return wide if self.scales is None else wide * self.scales[expert][:, None]


def _parts(weight: Tensor, quantization: Quantization | None) -> tuple[Tensor, ...]:
    match quantization:
        case "fp8":
            narrow = Fp8Matrix.of(weight)
            return narrow.values, narrow.scales.flatten()
        case "int4":
            matrix = Int4Matrix.of(weight)
            return matrix.words, matrix.scales, matrix.group_scales
        case _:
            return (weight,)
