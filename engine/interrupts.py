"""Ctrl-C and alarms where nothing may be left half done. Knows nothing of engines."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_held_back() -> Iterator[Callable[[], None]]:
    """In this block the handlers of signals, any of which may raise, wait until the block calls what it is given, or until its end.

    They run in the main thread: in others there is nothing to hold back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before: dict[int, Callable[[int, FrameType | None], object]] = {
        number: handler for number in signal.valid_signals() if callable(handler := signal.getsignal(number))
    }
    held: list[tuple[int, FrameType | None]] = []

    def let_through() -> None:
        while held:
            number, frame = held.pop(0)
            before[number](number, frame)

    try:
        for number in before:
            signal.signal(number, lambda number, frame: held.append((number, frame)))
        yield let_through
    finally:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, before)  # a handler that is back already would leave the others held back for good
        try:
            for number, handler in before.items():
                signal.signal(number, handler)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        let_through()
