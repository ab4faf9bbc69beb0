"""How a network is to be run: number formats, settled once and passed whole to what loads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Quantization = Literal["int8", "int4"]


class UnsupportedExecution(ValueError):
    """Formats that no executor of this machine has for this network. The message says why."""


@dataclass(frozen=True)
class Execution:
    """dtype is the number format of products and cache where nothing narrower is asked for.

    int8: weights with a scale per output, activations quantised per row. int4: weights with a scale per 32 inputs.
    Narrow weights and the int8 cache exist on the native executor only.
    """

    dtype: torch.dtype = torch.float32  # float32 or bfloat16
    quantization: Quantization | None = None  # of the weights
    kv_cache: Literal["int8"] | None = None  # None = dtype
    prefer_native: bool = True  # False: the torch executor even where the native one would run

    @property
    def needs_native(self) -> bool:
        return self.quantization is not None or self.kv_cache is not None
