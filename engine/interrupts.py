"""Ctrl-C where nothing may be left half done. Knows nothing of engines."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_held_back() -> Iterator[Callable[[], None]]:
    """In this block Ctrl-C waits until the block calls what it is given, or until its end.

    Signals are the main thread's: in others there is nothing to hold back.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield lambda: None
        return
    held: list[tuple[int, FrameType | None]] = []

    def let_through() -> None:
        if held:
            number, frame = held[0]
            held.clear()
            before(number, frame)

    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield let_through
    finally:
        signal.signal(signal.SIGINT, before)
    let_through()
