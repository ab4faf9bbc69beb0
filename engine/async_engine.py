"""The engine behind asyncio: a stream of deltas for every caller, admission to a bounded queue, drains and deaths.

Belongs to one event loop. The core is another thread's alone (engine_thread.py): what reaches it are commands.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ReferenceType, ref

from .engine_thread import Abort, Call, EngineThread, Stop
from .errors import EngineDead, InvalidRequest, QueueFull, RequestFailed, ShuttingDown
from .origin import ANYBODY, Origin
from .request import Adapter, SamplingParams, TokenDelta
from .stats import EngineStats
from .token_stream import TokenStream

if TYPE_CHECKING:
    from .adapters import Adapters
    from .boot import Engine
    from .core import EngineCore

T = TypeVar("T")

MAX_RETRY_AFTER_S = 60
_JOIN_TIMEOUT_S = 10.0


class AsyncEngine:
    """Runs an engine for one event loop. All methods belong to that loop."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # Weak: a stream lives as long as its caller reads it, and aborts what is left when dropped.
        self._streams: dict[str, ReferenceType[TokenStream]] = {}  # by request id, unfinished choices only
        self._calls: set[asyncio.Future[Any]] = set()  # whose results are waited for
        self._finish_times: deque[float] = deque(maxlen=64)
        self._guest_slots: list[int] = []  # of adapters, of pieces of work in flight that are done by several calls; 0 = none
        self._draining = self._over = False
        self._death: str | None = None  # why the thread ended by itself
        self._thread = EngineThread(engine.core, self._deliver, self._die)

    async def start(self) -> None:
        """Start the engine thread."""
        self._thread.start(asyncio.get_running_loop())

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        origin: Origin = ANYBODY,
        adapter: str | None = None,
    ) -> TokenStream:
        """Queue a request; iterate over the result for the deltas of all its choices. request_id must be unique. adapter: by name.

        Raises InvalidRequest, QueueFull, ShuttingDown or EngineDead at once, before anything is queued.
        """
        if self._death is not None:
            raise EngineDead(self._death)
        self._require_open()
        if not self._thread.is_alive:
            raise EngineDead("the engine does not run")
        self._admit(params.n)
        its_adapter, slot = self._wanted(adapter)
        requests = self.engine.intake.requests(request_id, prompt_token_ids, params, time.monotonic(), origin, its_adapter)
        assert not any(request.request_id in self._streams for request in requests), f"request id {request_id} is in use"
        stream = TokenStream([request.request_id for request in requests], self._abort, slot)
        reference = ref(stream)
        for request in requests:
            self._streams[request.request_id] = reference
            self._thread.put(request)
        return stream

    async def load_adapter(self, name: str, path: str, replace: bool = False) -> Adapter:
        """Read an adapter and let requests ask for it by name. replace: one of that name may be there already.

        Raises InvalidRequest, ModelLoadError, and what `call` raises.
        """
        adapters = self._adapters()

        def require_new() -> None:
            if not replace and adapters.get(name) is not None:
                raise InvalidRequest(f"the adapter {name!r} is loaded already: unload it first, or say load_inplace", "lora_name")

        require_new()
        weights = await asyncio.to_thread(adapters.read, path)
        require_new()
        streams = [reference() for reference in self._streams.values()]
        used = {stream.slot for stream in streams if stream is not None}
        adapter = adapters.place(name, path, weights.rank, used.union(self._guest_slots))
        # Requests that get it meanwhile reach the thread behind this; one that got what it replaces would find that slot overwritten.
        await self.call(lambda core: adapters.fill(adapter, weights))
        return adapter

    def unload_adapter(self, name: str) -> Adapter:
        """No new request gets it; those that have begun with it go on. Raises InvalidRequest."""
        return self._adapters().remove(name)

    async def call(self, work: Callable[[EngineCore], T]) -> T:
        """What `work` returns or raises, done by the engine thread between two steps: it delays them, so it should be short.

        Raises EngineDead if the thread does not run or ends before, RequestFailed if a drain is over before.
        """
        if not self.healthy:
            raise EngineDead(self._death or "the engine does not run")
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.add(result)
        result.add_done_callback(self._calls.discard)
        self._thread.put(Call(work, result))
        return await result

    @contextmanager
    def guest(self, adapter: str | None) -> Iterator[Adapter | None]:
        """Around work that is done by several calls: a drain waits for its end, and what it gets of that name stays where it is.

        The work has to ask for time before each call. Raises ShuttingDown, InvalidRequest.
        """
        self._require_open()
        its_adapter, slot = self._wanted(adapter)
        self._guest_slots.append(slot)
        try:
            yield its_adapter
        finally:
            self._guest_slots.remove(slot)

    def ask_for_time(self) -> None:
        """Raises RequestFailed if a drain is over."""
        if self._over:
            raise _shut_down()

    @property
    def num_guests(self) -> int:
        return len(self._guest_slots)

    @property
    def num_in_flight(self) -> int:
        """Choices queued or running."""
        return len(self._streams)

    @property
    def healthy(self) -> bool:
        """Whether the engine thread runs. It may still hang: see last_step_age_s."""
        return self._death is None and self._thread.is_alive

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def last_step_age_s(self) -> float:
        """Seconds since the step in progress began, or the work of a `call`; 0 when idle. A watchdog's alarm is a value above the longest
        sane step."""
        started = self._thread.turn_started
        return 0.0 if started is None else max(0.0, time.monotonic() - started)

    def stats(self) -> EngineStats:
        """The latest snapshot, at most 0.1 s and one step old."""
        return self._thread.stats()

    def begin_drain(self) -> None:
        """Refuse new requests from now on; those in flight go on."""
        self._draining = True

    async def drain(self, timeout_s: float) -> None:
        """Wait until nothing is in flight. After timeout_s the rest fails with RequestFailed, code server_shutdown."""
        self.begin_drain()
        deadline = time.monotonic() + timeout_s
        while (self._streams or self.num_guests) and self.healthy and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        self._end()

    async def stop(self) -> None:
        """End the engine thread after the step in progress; what is in flight fails as in `drain`."""
        self.begin_drain()
        self._end()
        self._thread.put(Stop())
        if self._thread.is_alive:
            await asyncio.to_thread(self._thread.join, _JOIN_TIMEOUT_S)
        self._fail_calls(lambda: EngineDead("the engine has been stopped"))

    def _require_open(self) -> None:
        if self._draining:
            raise ShuttingDown("the server is shutting down and takes no new requests")

    def _wanted(self, adapter: str | None) -> tuple[Adapter | None, int]:
        """The one of this name, and its slot; 0 = none. Raises InvalidRequest."""
        found = None if adapter is None else self._adapters().require(adapter)
        return found, 0 if found is None else found.slot

    def _adapters(self) -> Adapters:
        if self.engine.adapters is None:
            raise InvalidRequest("adapters are not served: start with enable_lora (--enable-lora)", "model", "model_not_found")
        return self.engine.adapters

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
        rate = len(times) / max(time.monotonic() - times[0], 1e-3)
        return min(max(math.ceil(num_waiting / rate), 1), MAX_RETRY_AFTER_S)

    def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._streams.pop(request_id, None)
            self._thread.put(Abort(request_id))

    def _deliver(self, deltas: list[TokenDelta], at: float) -> None:
        for delta in deltas:
            if delta.finish_reason is None:
                reference = self._streams.get(delta.request_id)
            else:
                reference = self._streams.pop(delta.request_id, None)
                self._finish_times.append(at)
            if reference is not None and (stream := reference()) is not None:
                stream.put(delta)

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


def _shut_down() -> RequestFailed:
    return RequestFailed("the server is shutting down", "server_shutdown")
