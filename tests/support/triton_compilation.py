"""Compiles Triton kernels for an H200, or another GPU, on any machine: launches build them, down to machine code, and run nothing.

Needs a process without TRITON_INTERPRET. ptxas and cuobjdump come with Triton.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True)
class Build:
    """What one kernel takes on the GPU."""

    name: str
    warps: int
    registers: int  # of each thread
    spilled_bytes: int  # of each thread, that did not fit into registers
    shared_bytes: int  # of each program
    code: str  # PTX

    def __str__(self) -> str:
        return f"{self.name}: {self.warps} warps, {self.registers} registers, {self.spilled_bytes} spilled, {self.shared_bytes} shared"


class _NoGPU:
    """As much of a driver as compilation asks for."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def builds(capability: int = 90) -> Iterator[list[Build]]:
    """Within, launches only compile, for GPUs of this compute capability; the list has one entry for each."""
    found: list[Build] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        found.append(_build(kernel))
        return kernel

    active = driver._active
    driver.set_active(cast(DriverBase, _NoGPU(capability)))
    JITFunction.run = compile_only
    try:
        yield found
    finally:
        JITFunction.run = run
        driver._active = active


@cache  # most launches find a kernel that is there already
def _build(kernel: Any) -> Build:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.check_output([_CUOBJDUMP, "--dump-resource-usage", file.name], text=True)
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL"))  # type: ignore[index]
    return Build(kernel.name, kernel.metadata.num_warps, registers, stack + local, kernel.metadata.shared, kernel.asm["ptx"])
