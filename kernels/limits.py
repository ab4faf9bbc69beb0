"""What this machine itself can do: bytes read and operations computed a second. Yardsticks for a benchmark; knows no network."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Literal

import torch

from . import native_library

Kind = Literal["float32", "bfloat16", "int8"]
KINDS: tuple[Kind, ...] = ("float32", "bfloat16", "int8")

CHUNK = 64 * 1024  # bytes; the library reads whole ones


class ReadBuffer:
    """Memory to read from, filled and in place. Close it, or use it as a context: it can be gigabytes.

    Without the native library it is a tensor that torch sums, somewhat slower than the machine could.
    """

    def __init__(self, num_bytes: int) -> None:
        """Raises MemoryError."""
        self.num_bytes = max(num_bytes, CHUNK) // CHUNK * CHUNK
        self._library = _library()
        self._tensor = None if self._library else torch.ones(self.num_bytes // 4, dtype=torch.float32)
        self._pointer = self._library.ft_read_buffer(self.num_bytes) if self._library else None
        if self._library and not self._pointer:
            raise MemoryError(f"no memory for a buffer of {self.num_bytes:,} bytes")

    def read_rate(self, threads: int, passes: int) -> float:
        """Bytes a second of the fastest of `passes` passes over the whole buffer, after one that does not count."""
        if self._library:
            return self.num_bytes / self._library.ft_read_seconds(self._pointer, self.num_bytes, threads, passes)
        assert self._tensor is not None, "the buffer is closed"
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            seconds = min(_seconds(self._tensor.sum) for _ in range(passes + 1))
        finally:
            torch.set_num_threads(before)
        return self.num_bytes / seconds

    def close(self) -> None:
        if self._library and self._pointer:
            self._library.ft_free_read_buffer(self._pointer)
        self._pointer = self._tensor = None

    def __enter__(self) -> ReadBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def operations_per_second(kind: Kind, threads: int, seconds: float = 0.2) -> float | None:
    """Products and sums a second, from registers, with the widest instruction there is for them; None if there is none."""
    library = _library()
    return (library.ft_operations_per_second(KINDS.index(kind), threads, seconds) or None) if library else None


def _library() -> ctypes.CDLL | None:
    library = native_library.load()
    if library is not None:
        library.ft_read_buffer.restype, library.ft_read_buffer.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        library.ft_free_read_buffer.restype, library.ft_free_read_buffer.argtypes = None, [ctypes.c_void_p]
        library.ft_read_seconds.restype = library.ft_operations_per_second.restype = ctypes.c_double
        library.ft_read_seconds.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
        library.ft_operations_per_second.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_double]
    return library


def _seconds(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started
