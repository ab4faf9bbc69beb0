"""What measuring the GPU path shares: the device, how much is asked of it, and the figures that come of it. Knows no case."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig

from ...kernels.graphs import GraphExecutor
from ...kernels.layout import KVTensors, StateRoom
from ...kernels.torch_kv import TorchKV
from ...proposers.config import SpeculativeConfig
from .gpu_clock import Ceilings
from .gpu_model import LLAMA_1B, LLAMA_8B, QWEN3_5_9B, TINY, TINY_QWEN3_5, MadeEngine, Size, loaded, network
from .network import BLOCK

OFF = SpeculativeConfig(off=True)


@dataclass(frozen=True)
class Figure:
    """One number. With a bar it is kept or missed; without, it only explains."""

    case: str
    name: str
    value: float
    unit: str
    bar: float | None = None
    better: Literal["more", "less"] = "more"
    note: str = ""

    @property
    def kept(self) -> bool | None:
        if self.bar is None:
            return None
        return self.value >= self.bar if self.better == "more" else self.value <= self.bar


@dataclass(frozen=True)
class Effort:
    """How much is asked of the device."""

    size: Size
    short: Size  # of a network whose passes end before the host has made the next one ready
    recurrent: PreTrainedConfig  # of the network with recurrent layers
    dtype: torch.dtype
    context: int  # of one stream
    verified: tuple[int, ...]
    attention_rows: int
    attention_context: int
    streams: int
    prompt_tokens: int
    new_tokens: int
    profiled_rows: int
    profiled_context: int
    decoded: int  # tokens of one stream
    runs: int


FULL = Effort(LLAMA_8B, LLAMA_1B, QWEN3_5_9B, torch.bfloat16, 1024, (1, 2, 4, 8, 16, 32), 64, 8192, 256, 512, 256, 64, 1024, 256, 20)
SMALL = Effort(TINY, TINY, TINY_QWEN3_5, torch.float32, 64, (1, 2), 3, 64, 3, 16, 4, 2, 16, 16, 1)


class Bench:
    """A device, an effort, and what several cases share."""

    def __init__(self, device: torch.device, effort: Effort, folder: Path) -> None:
        self.device, self.effort, self.folder = device, effort, folder
        self._ceilings: Ceilings | None = None

    @property
    def ceilings(self) -> Ceilings:
        """Measured once in each process, before the first case that needs them."""
        if self._ceilings is None:
            small = self.device.type == "cpu"
            self._ceilings = Ceilings.measure(self.device, **({"copy_bytes": 1 << 22, "product": 256} if small else {}))
        return self._ceilings

    def executor(self, **options: Any) -> GraphExecutor:
        return network(self.effort.size, self.device, self.effort.dtype, **options)

    @contextmanager
    def engine(
        self, speculative: SpeculativeConfig, rows: int, tokens_per_row: int, step_tokens: int = 2048, **options: Any
    ) -> Iterator[MadeEngine]:
        """An engine of its own; the caller is its last owner, and what it leaves is given back behind the case."""
        folder = self.folder / "target"
        folder.mkdir(parents=True, exist_ok=True)
        engine = MadeEngine.make(loaded(self.effort.size, self.executor(**options), folder), speculative, rows, tokens_per_row, step_tokens)
        try:
            yield engine
        finally:
            engine.drop()


def release(device: torch.device) -> None:
    """Give back what is owned no more: between cases, when nobody's variables hold any of it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def filled(executor: GraphExecutor, num_blocks: int, room: StateRoom | None = None) -> KVTensors:
    """A cache whose places all hold something, states and guesses too."""
    kv = executor.allocate(num_blocks, BLOCK, room)
    assert isinstance(kv, TorchKV)
    for cache in (*kv.k, *kv.v, *kv.states, *kv.guesses):
        cache.normal_()
    return kv
