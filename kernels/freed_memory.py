"""What becomes of memory that is freed, while many large tensors are each made once and dropped."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_LARGE = 1 << 20  # bytes
_KEPT, _KEPT_AT_THE_END = 32 << 20, 64 << 20  # what glibc comes to by itself once pieces of 32 MB, its limit, were freed


@contextmanager
def returned_at_once() -> Iterator[None]:
    """Within it the system gets large pieces of memory back when they are freed; the C library may keep as much again as is in use."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # of glibc
    if set_option is None:
        yield
        return
    set_option(_MMAP_THRESHOLD, _LARGE)
    set_option(_TRIM_THRESHOLD, _LARGE)
    try:
        yield
    finally:  # steps free and take the same sizes again and again
        set_option(_MMAP_THRESHOLD, _KEPT)
        set_option(_TRIM_THRESHOLD, _KEPT_AT_THE_END)
