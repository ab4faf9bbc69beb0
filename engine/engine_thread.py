"""The engine's own thread, the only one that touches the core (and so torch). It never waits for a caller.

Commands reach it through a queue that is emptied before each step; what a step gives goes to the event loop in one call. Knows no streams.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from .request import Request, TokenDelta
from .stats import EngineStats

if TYPE_CHECKING:
    from .core import EngineCore

logger = logging.getLogger("foretoken.engine")

STATS_INTERVAL_S = 0.1
SENDING_S = 5e-3
"""The longest that a step waits until the loop has sent what the one before gave: both want the interpreter, and one after the other they
are quicker than against each other. Besides, where a step takes all cores, the loop would hardly send a first token before its end."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Command: the client wants no more."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Call:
    """Command: work between two steps, and who waits for what it returns."""

    work: Callable[[EngineCore], Any]
    result: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class Stop:
    """Command: end after the step in progress."""


Command = Request | Abort | Call | Stop


class EngineThread:
    """Steps a core as long as it has work, and sleeps otherwise. All methods belong to the event loop."""

    def __init__(
        self, core: EngineCore, deliver: Callable[[list[TokenDelta], float], None], die: Callable[[BaseException], None]
    ) -> None:
        """Both are called on the loop: deliver with what a step gave and when it ended, die with why the thread ended by itself."""
        self._core = core
        self._deliver = deliver
        self._die = die
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._main, name="foretoken-engine", daemon=True)
        self._turn = threading.Lock()  # held by who looks at the core: the thread in its turns, between them a caller for a snapshot
        self._stats, self._stats_time = EngineStats(), -math.inf
        self._sent = threading.Event()
        self._is_behind = False  # turns have ended since the snapshot
        # Written by the thread; a single reference, so that reading needs no lock.
        self.turn_started: float | None = None  # of the step, or the work between two, that is done or was done last; None = idle

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    def stats(self) -> EngineStats:
        """At most STATS_INTERVAL_S and one step old. Between two steps the snapshot is made now: no answer has to wait for it."""
        if self._turn.acquire(blocking=False):
            try:
                now = time.monotonic()
                is_ageing = self._stats.recent_draft_tokens > 0 and now - self._stats_time >= STATS_INTERVAL_S
                if self._is_behind or is_ageing:
                    self._stats, self._stats_time, self._is_behind = self._core.stats(now), now, False
            finally:
                self._turn.release()
        return self._stats

    def put(self, command: Command) -> None:
        self._inbox.put(command)
        self._core.interrupt()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    # From here on: the thread's own.

    def _main(self) -> None:
        try:
            self._run()
        except BaseException as error:  # whatever it was, every caller must hear of it
            logger.exception("the engine thread ends")
            self._tell_loop(self._die, error)
        finally:
            self._core.close()

    def _run(self) -> None:
        core = self._core
        while True:
            deltas: list[TokenDelta] = []
            core.resume()  # before the inbox is emptied: what comes later interrupts again
            first = () if core.has_work else (self._wait(),)
            self.turn_started = time.monotonic()
            with self._turn:
                self._is_behind = False
                for command in chain(first, self._commands()):
                    match command:
                        case Request():
                            core.add_request(command)
                        case Abort(request_id):
                            if (delta := core.abort(request_id)) is not None:
                                deltas.append(delta)
                        case Call(work, result):
                            self._do(work, result)
                        case Stop():
                            self._stats = core.stats()
                            return
                if core.has_work:
                    self.turn_started = time.monotonic()
                    deltas.extend(core.step(self.turn_started))
                now = time.monotonic()
                self._is_behind = True
            if deltas:
                self._sent.clear()
                if not self._tell_loop(self._send, deltas, now):
                    return
            if not core.has_work:
                continue
            if deltas:
                self._sent.wait(SENDING_S)
            if now - self._stats_time >= STATS_INTERVAL_S:
                self.stats()

    def _do(self, work: Callable[[EngineCore], Any], result: asyncio.Future[Any]) -> None:
        try:
            value = work(self._core)
        except Exception as error:  # the caller's work is the caller's fault
            self._tell_loop(_settle, result, None, error)
        else:
            self._tell_loop(_settle, result, value, None)

    def _wait(self) -> Command:
        self.turn_started = None
        try:
            return self._inbox.get(timeout=max(0.0, self._stats_time + STATS_INTERVAL_S - time.monotonic()))
        except Empty:
            self._tell_loop(self.stats)  # there, so that whoever asks meanwhile has nothing to wait for
            return self._inbox.get()

    def _commands(self) -> Iterator[Command]:
        """Everything in the queue."""
        while True:
            try:
                yield self._inbox.get_nowait()
            except Empty:
                return

    def _send(self, deltas: list[TokenDelta], at: float) -> None:
        """On the loop."""
        assert self._loop is not None
        self._deliver(deltas, at)
        self._loop.call_soon(self._sent.set)  # behind the readers that were woken

    def _tell_loop(self, callback: Callable[..., object], *args: object) -> bool:
        """False if the loop has been closed: then nobody is left to serve."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            return False
        return True


def _settle(result: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if result.done():  # its caller has gone
        return
    if error is None:
        result.set_result(value)
    else:
        result.set_exception(error)
