"""The engine behind asyncio: a thread that steps the core, and a stream of deltas for every caller.

The thread is the only one that touches the core (and so torch). Commands reach it through a queue that is emptied before
each step; what a step gives goes back to the event loop in one call. The thread never waits for a caller.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ReferenceType, ref

from .errors import EngineDead, QueueFull, RequestFailed, ShuttingDown
from .request import Request, SamplingParams, TokenDelta
from .stats import EngineStats
from .token_stream import TokenStream

if TYPE_CHECKING:
    from .boot import Engine
    from .core import EngineCore

T = TypeVar("T")

logger = logging.getLogger("foretoken.engine")

STATS_INTERVAL_S = 0.1
MAX_RETRY_AFTER_S = 60
_JOIN_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Abort:
    """Command to the engine thread."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Call:
    """Command to the engine thread: work between two steps, and who waits for what it returns."""

    work: Callable[[EngineCore], Any]
    result: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class Stop:
    """Command to the engine thread."""


class AsyncEngine:
    """Runs an engine for one event loop. All methods belong to that loop."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine = engine
        self._clock = clock
        self._inbox: SimpleQueue[Request | Abort | Call | Stop] = SimpleQueue()
        # Weak: a stream lives as long as its caller reads it, and aborts what is left when dropped.
        self._streams: dict[str, ReferenceType[TokenStream]] = {}  # by request id, unfinished choices only
        self._calls: set[asyncio.Future[Any]] = set()  # whose results are waited for
        self._finish_times: deque[float] = deque(maxlen=64)
        self.num_guests = 0  # pieces of work in flight that are done by several calls
        self._draining = self._over = False
        self._death: str | None = None  # why the thread ended by itself
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._thread_main, name="foretoken-engine", daemon=True)
        # Written by the thread; single references, so that reading needs no lock.
        self._stats = EngineStats()
        self._stats_time = -math.inf
        self._turn_started: float | None = None  # of the step in progress or between steps; None = idle

    async def start(self) -> None:
        """Start the engine thread."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
    ) -> TokenStream:
        """Queue a request; iterate over the result for the deltas of all its choices. request_id must be unique.

        Raises InvalidRequest, QueueFull, ShuttingDown or EngineDead at once, before anything is queued.
        """
        if self._death is not None:
            raise EngineDead(self._death)
        if self._draining:
            raise ShuttingDown("the server is shutting down and takes no new requests")
        if not self._thread.is_alive():
            raise EngineDead("the engine does not run")
        self._admit(params.n)
        now = self._clock()
        requests = self.engine.intake.requests(request_id, prompt_token_ids, params, now, priority, cache_salt, tenant)
        assert not any(request.request_id in self._streams for request in requests), f"request id {request_id} is in use"
        stream = TokenStream([request.request_id for request in requests], now, self._abort)
        reference = ref(stream)
        for request in requests:
            self._streams[request.request_id] = reference
            self._inbox.put(request)
        return stream

    async def call(self, work: Callable[[EngineCore], T]) -> T:
        """What `work` returns or raises, done by the engine thread between two steps: it delays them, so it should be short.

        Raises EngineDead if the thread does not run or ends before, RequestFailed if a drain is over before.
        """
        if not self.healthy:
            raise EngineDead(self._death or "the engine does not run")
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.add(result)
        result.add_done_callback(self._calls.discard)
        self._inbox.put(Call(work, result))
        return await result

    @contextmanager
    def guest(self) -> Iterator[None]:
        """Around work that is done by several calls: a drain waits for its end. Raises ShuttingDown.

        The work has to ask for time before each call.
        """
        if self._draining:
            raise ShuttingDown("the server is shutting down and takes no new requests")
        self.num_guests += 1
        try:
            yield
        finally:
            self.num_guests -= 1

    def ask_for_time(self) -> None:
        """Raises RequestFailed if a drain is over."""
        if self._over:
            raise _shut_down()

    @property
    def num_in_flight(self) -> int:
        """Choices queued or running."""
        return len(self._streams)

    @property
    def healthy(self) -> bool:
        """Whether the engine thread runs. It may still hang: see last_step_age_s."""
        return self._death is None and self._thread.is_alive()

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def last_step_age_s(self) -> float:
        """Seconds since the step in progress began; 0 when idle. A watchdog's alarm is a value above the longest sane step."""
        started = self._turn_started
        return 0.0 if started is None else max(0.0, self._clock() - started)

    def stats(self) -> EngineStats:
        """The latest snapshot, at most STATS_INTERVAL_S and one step old."""
        return self._stats

    def begin_drain(self) -> None:
        """Refuse new requests from now on; those in flight go on."""
        self._draining = True

    async def drain(self, timeout_s: float) -> None:
        """Wait until nothing is in flight. After timeout_s the rest fails with RequestFailed, code server_shutdown."""
        self.begin_drain()
        deadline = self._clock() + timeout_s
        while (self._streams or self.num_guests) and self.healthy and self._clock() < deadline:
            await asyncio.sleep(0.01)
        self._end()

    async def stop(self) -> None:
        """End the engine thread after the step in progress; what is in flight fails as in `drain`."""
        self.begin_drain()
        self._end()
        self._inbox.put(Stop())
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, _JOIN_TIMEOUT_S)
        self._fail_calls(lambda: EngineDead("the engine has been stopped"))

    def _admit(self, num_choices: int) -> None:
        """Bound what is in flight: every seat taken and the queue full. An idle engine takes any request. Raises QueueFull."""
        config, in_flight = self.engine.config, len(self._streams)
        num_waiting = in_flight - config.scheduler.max_num_seqs
        if in_flight and num_waiting + num_choices > config.max_queued_requests:
            raise QueueFull(f"the queue is full: {max(num_waiting, 0):,} requests are waiting", self._retry_after_s(num_waiting))

    def _retry_after_s(self, num_waiting: int) -> int:
        """When the requests that wait now will have been served, at the rate of the latest ones."""
        times = self._finish_times
        if not times or num_waiting <= 0:
            return 1
        rate = len(times) / max(self._clock() - times[0], 1e-3)
        return min(max(math.ceil(num_waiting / rate), 1), MAX_RETRY_AFTER_S)

    def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._streams.pop(request_id, None)
            self._inbox.put(Abort(request_id))

    def _deliver(self, deltas: list[TokenDelta], at: float) -> None:
        for delta in deltas:
            if delta.finish_reason is None:
                reference = self._streams.get(delta.request_id)
            else:
                reference = self._streams.pop(delta.request_id, None)
                self._finish_times.append(at)
            if reference is not None and (stream := reference()) is not None:
                stream.put(delta, at)

    def _die(self, error: BaseException) -> None:
        death = self._death = f"the engine has stopped ({type(error).__name__}); it must be restarted"
        self._fail_streams(lambda: EngineDead(death))
        self._fail_calls(lambda: EngineDead(death))

    def _fail_streams(self, make_error: Callable[[], Exception]) -> None:
        for reference in set(self._streams.values()):
            if (stream := reference()) is not None:
                stream.fail(make_error())

    def _fail_calls(self, make_error: Callable[[], Exception]) -> None:
        for result in [*self._calls]:
            if not result.done():
                result.set_exception(make_error())

    def _end(self) -> None:
        """A drain is over: what is in flight fails."""
        self._over = True
        self._fail_streams(_shut_down)
        self._fail_calls(_shut_down)

    # From here on: the engine thread.

    def _thread_main(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - whatever it was, every caller must hear of it
            logger.exception("the engine thread ends")
            self._tell_loop(self._die, error)
        finally:
            self.engine.core.close()

    def _run(self) -> None:
        core = self.engine.core
        while True:
            deltas: list[TokenDelta] = []
            for command in self._commands(wait=not core.has_work):
                match command:
                    case Request():
                        core.add_request(command)
                    case Abort(request_id):
                        if (delta := core.abort(request_id)) is not None:
                            deltas.append(delta)
                    case Call(work, result):
                        self._do(work, result)
                    case Stop():
                        return
            self._turn_started = self._clock()
            if core.has_work:
                deltas.extend(core.step(self._turn_started))
            now = self._clock()
            if not core.has_work or now - self._stats_time >= STATS_INTERVAL_S:
                self._stats, self._stats_time = core.stats(), now
            if deltas and not self._tell_loop(self._deliver, deltas, now):
                return

    def _do(self, work: Callable[[EngineCore], Any], result: asyncio.Future[Any]) -> None:
        try:
            value = work(self.engine.core)
        except Exception as error:  # noqa: BLE001 - the caller's work is the caller's fault
            self._tell_loop(_settle, result, None, error)
        else:
            self._tell_loop(_settle, result, value, None)

    def _commands(self, wait: bool) -> Iterator[Request | Abort | Call | Stop]:
        """Everything in the queue; if wait, at least one command."""
        if wait:
            self._turn_started = None
            yield self._inbox.get()
        while True:
            try:
                yield self._inbox.get_nowait()
            except Empty:
                return

    def _tell_loop(self, callback: Callable[..., None], *args: object) -> bool:
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


def _shut_down() -> RequestFailed:
    return RequestFailed("the server is shutting down", "server_shutdown")
