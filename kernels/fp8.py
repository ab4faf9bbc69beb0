"""8-bit floats, on GPUs that multiply them (Hopper, Ada), as weights of products and in the cache: half the bytes of bfloat16.

Weights are e4m3 with a scale for each output (Micikevicius et al. 2022). Few rows multiply them as they are, which is a matter of
reading; many rows are made e4m3 too, with a scale for each row. Keys and values are e4m3 without a scale: they lie well within its
range, and as long as they do a scale would not make the 3 bits behind the point any finer. Owns the number format; knows no program.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
UNIT = 16
"""Inputs and outputs must be multiples of this."""

LEAST_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs that multiply e4m3."""


FewRows = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
"""(x [T, in], values [out, in] e4m3, scales [out], bias [out], residual [T, out]) -> (x @ values.T) * scales + bias + residual."""


@dataclass(frozen=True)
class Fp8Matrix:
    """A weight [out, in] as weight[o, i] = values[o, i] * scales[o]."""

    values: Tensor  # [out, in] e4m3
    scales: Tensor  # [out, 1] float32

    @staticmethod
    def fits(shape: tuple[int, ...]) -> bool:
        """Whether the hardware multiplies a weight of this shape."""
        return all(size % UNIT == 0 for size in shape)

    @staticmethod
    def num_bytes(shape: tuple[int, ...]) -> int:
        """That a weight [out, in] takes."""
        return math.prod(shape) + 4 * shape[0]

    @classmethod
    def of(cls, weight: Tensor) -> Fp8Matrix:
        return cls(*quantised(weight.contiguous()))

    def product(
        self, bias: Tensor | None, few: FewRows, most_few: int, quantise: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> Callable[[Tensor, Tensor | None], Tensor]:
        """(x [T, in], residual [T, out] or None) -> x @ weight.T + bias + residual, in x's dtype.

        few: does it all for at most most_few rows of x. quantise: as `quantised`.
        """
        columns, scales, flat_scales = self.values.t(), self.scales.t().contiguous(), self.scales.flatten()

        def apply(x: Tensor, residual: Tensor | None) -> Tensor:
            if 0 < len(x) <= most_few:
                return few(x, self.values, flat_scales, bias, residual)
            narrow, row_scales = quantise(x)
            dtype = product_dtype(x.dtype, x.device)
            out = torch._scaled_mm(narrow, columns, row_scales, scales, out_dtype=dtype, use_fast_accum=True).to(x.dtype)
            out = out if residual is None else out.add_(residual)
            return out if bias is None else out.add_(bias)

        return apply


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What products of many rows come out as where dtype is wanted.

    Under a scale for each row every GPU and every CUDA has bfloat16; float32 only Hopper has, and that from CUDA 12.9 on. Its rounding
    is small beside that of the factors.
    """
    return torch.bfloat16 if device.type == "cuda" else dtype


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [n, k] as e4m3 [n, k] times scales [n, 1] float32; a row of zeros has scale 1. triton/quantise.py does it in one launch."""
    wide = x.float()
    scales = wide.abs().amax(-1, keepdim=True) / LARGEST
    scales = torch.where(scales > 0, scales, 1.0)
    return nearest(wide / scales), scales


def nearest(x: Tensor) -> Tensor:
    """x as e4m3; what is beyond its range becomes the last number in it, and NaN stays NaN."""
    return x.clamp(-LARGEST, LARGEST).to(FP8)
