"""The machine that figures were measured on, in words: without them no figure means anything."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from ...kernels import native_library

INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")


@dataclass(frozen=True)
class Machine:
    """What decides speed."""

    cpu: str
    cores: int  # that this process may use
    instructions: tuple[str, ...]  # of those that matter here
    last_level_cache: str  # "32768K"; "" = not known
    memory_gb: float
    system: str
    python: str
    torch: str
    native: str  # instruction set of the native executor, or why there is none

    def describe(self) -> str:
        """One paragraph of Markdown."""
        cache = f", last-level cache {self.last_level_cache}" if self.last_level_cache else ""
        return (
            f"{self.cores} cores of {self.cpu} ({', '.join(self.instructions)}{cache}), {self.memory_gb:.0f} GiB, {self.system}, "
            f"Python {self.python}, torch {self.torch}; native executor: {self.native}"
        )


def this_machine() -> Machine:
    import torch  # here: a command reads its flags before it takes seconds to load

    info = _cpu_info()
    native = native_library.availability()
    flags = set(info.get("flags", "").split())
    return Machine(
        cpu=info.get("model name") or platform.processor() or platform.machine(),
        cores=native_library.usable_cores(),
        instructions=tuple(name for name in INSTRUCTIONS if name in flags),
        last_level_cache=_last_level_cache(),
        memory_gb=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=torch.__version__,
        native=native.isa or f"none: {native.reason}",
    )


def _cpu_info() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty where there is no such file."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    lines = path.read_text().split("\n\n")[0].splitlines()
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _last_level_cache() -> str:
    levels = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    return levels[-1].read_text().strip() if levels else ""
