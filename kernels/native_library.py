"""The compiled part of the package, if there is one: finding it, what it can do here, its threads. Knows no networks."""

import ctypes
import functools
import importlib.machinery
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from .cgroups import folders
from .native_abi import declare, fits

ISAS = ("avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx")
"""Instruction sets by the number that the library gives them."""


@dataclass(frozen=True)
class Availability:
    """isa: the best instruction set that is compiled in and runs here, None if there is none; then reason says what to do."""

    isa: str | None
    reason: str


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library, None if there is none that can be used. Its functions release the interpreter lock while they run."""
    found = _found()
    return None if isinstance(found, str) else found


@functools.cache
def availability() -> Availability:
    """Whether networks can run natively on this machine."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return Availability(None, f"this is a {platform.machine()} machine; native code exists for x86-64 with AVX2")
    found = _found()
    if isinstance(found, str):
        return Availability(None, found)
    isa = found.ft_isa()
    if isa < 0:
        return Availability(None, "this processor has no AVX2 with FMA (Intel since 2013 and AMD since 2017 have)")
    return Availability(ISAS[isa], "")


def set_threads(count: int) -> None:
    """Threads that a pass runs on, the calling one included; for the whole process, 1 at first.

    The passes under way end before it changes. More than 256, or more than the system gives, become fewer: `threads` tells.
    """
    library = load()
    if library is not None:
        library.ft_set_threads(count)


def threads() -> int:
    library = load()
    return 1 if library is None else library.ft_threads()


def sources() -> str:
    """A digest of what the library was compiled from, "" without one: what was measured with another says nothing of this."""
    library = load()
    return "" if library is None else library.ft_sources().decode()


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: those it may run on, no more than a quota pays for (`docker --cpus 2`, systemd's CPUQuota=)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in folders("cpu", root):
        try:
            quota, period = (group / "cpu.max").read_text().split()
        except (OSError, ValueError):  # not of version 2, or without a quota
            continue
        if quota != "max":
            cores = max(1, min(cores, round(int(quota) / int(period))))
    return cores


@functools.cache
def _found() -> ctypes.CDLL | str:
    """The library, or why there is none that can be used and what to do."""
    if (path := _path()) is None:
        return (
            "no C++ compiler that can build it was found at install; install g++ 11 or newer (apt install g++), then run that "
            "pip install again with --force-reinstall --no-deps"
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:  # built where system libraries are newer, cut off, on a file system that nothing is run from
        return f"its library cannot be loaded ({error}); install again on this machine"
    if not fits(library, Path(__file__).with_name("native")):
        return "its library was compiled from other sources; install again (pip install . or make install)"
    declare(library)
    return library


def _path() -> Path | None:
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_native{suffix}")
        if path.exists():
            return path
    return None
