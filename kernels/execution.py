"""How a network is to be run: number formats, settled once and passed whole to what loads it."""

from dataclasses import dataclass
from typing import Literal

import torch

Quantization = Literal["int8", "int4", "fp8"]


class UnsupportedExecution(ValueError):
    """Formats that no executor of this machine has for this network. The message says why."""


@dataclass(frozen=True)
class Execution:
    """dtype is the number format of products and cache where nothing narrower is asked for.

    int8: weights with a scale per output, activations quantised per row. int4: weights with a scale per 32 inputs; on a CPU
    activations are quantised as for int8. fp8: weights with a scale per output. int8 and the int8 cache exist on the native
    executor only, int4 there and on GPUs, fp8 and the fp8 cache on GPUs only.
    """

    dtype: torch.dtype = torch.float32  # float32 or bfloat16
    quantization: Quantization | None = None  # of the weights
    kv_cache: Literal["int8", "fp8"] | None = None  # None = dtype
    prefer_native: bool = True  # False: the torch executor even where the native one would run
    device: str = "cpu"  # or "cuda", "cuda:1", ...: the torch executor with Triton kernels and graphs
    narrow_head: bool = False  # fp8 for the head too, as drafters have it
    as_stored: bool = False  # what a quantised checkpoint has in plain numbers is not made narrow
    batch_invariant: bool = False  # a token's scores are the same bits in any batch; the native executor is so anyway

    @property
    def needs_native(self) -> bool:
        return self.quantization in (("int8",) if self.on_gpu else ("int8", "int4")) or self.kv_cache == "int8"

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"
