"""What is shown on stderr while something loads: a line for each act, with the seconds since the start. On a terminal the clock runs.

Owns what the garbage collector does meanwhile, too.
"""

from __future__ import annotations

import atexit
import gc
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from tqdm import tqdm

TICK_S = 0.5


class Loading:
    """Called with what begins now. After `close` a call is one more line.

    A file or pipe gets whole lines and nothing else. On a terminal the latest line is written anew while its act goes on, above
    the bars of others; with `brief` it is the only one, and `close` removes it.
    """

    def __init__(self, brief: bool = False) -> None:
        self._start = time.monotonic()
        self._is_brief = brief
        self._message = ""
        self._closed = threading.Event()
        self._bar: tqdm[NoReturn] | None = None
        if sys.stderr.isatty():
            self._bar = tqdm(bar_format="{desc}", leave=False, dynamic_ncols=True)
            threading.Thread(target=self._tick, daemon=True).start()

    def __call__(self, message: str) -> None:
        if self._bar is None or self._closed.is_set():
            tell(self._line(message))
            return
        self._keep_line()
        self._message = message
        self._bar.set_description_str(self._line(message))

    def close(self) -> None:
        if self._bar is not None and not self._closed.is_set():
            self._closed.set()
            self._keep_line()
            self._bar.close()

    def __enter__(self) -> Loading:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tick(self) -> None:
        while not self._closed.wait(TICK_S):
            if self._bar is not None and self._message:
                self._bar.set_description_str(self._line(self._message))

    def _keep_line(self) -> None:
        """An act has ended: its line stays, with the time of its end."""
        if self._message and not self._is_brief:
            tqdm.write(self._line(self._message), file=sys.stderr)

    def _line(self, message: str) -> str:
        return f"foretoken: [{time.monotonic() - self._start:5.1f} s] {message}"


@contextmanager
def imported() -> Iterator[None]:
    """Modules that are imported within stay, and no collection looks at them: that would free one MB in a tenth of a start's CPU time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else the interpreter's end leaves objects behind, which some extensions report at length


@contextmanager
def kept() -> Iterator[None]:
    """What is loaded within stays: a collection looks at it once, when it is whole, instead of again and again while it grows.

    Later ones, which stop the engine for milliseconds, look at none of it.
    """
    with imported():
        yield
        gc.collect()


def tell(text: str) -> None:
    """Lines on stderr. One that takes none, on a full disk or without a reader, holds up nothing: a log is no reason not to serve."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
