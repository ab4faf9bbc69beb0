"""What a streamed chunk costs the event loop: the real app under uvicorn, 32 readers, and an engine that takes no time.

Only the loop's own processor time counts, between two steps in the middle: neither waiting nor the requests' beginnings do.
"""

from __future__ import annotations

import asyncio
import json
import selectors
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvicorn
from fake_engine import FakeEngine

from foretoken.engine.async_engine import AsyncEngine
from foretoken.engine.config import EngineConfig
from foretoken.engine.request import Request, SpeculationStats, TokenDelta
from foretoken.engine.stats import EngineStats
from foretoken.server.app import create_app
from foretoken.server.config import ServerConfig
from foretoken.server.connection import Connection
from foretoken.server.listener import listen

READERS = 32
STEPS = 120
MEASURED = range(20, 110)
ROUNDS = 8  # at most: the quickest counts, and machines have slow minutes
MAX_SECONDS_PER_CHUNK = 60e-6  # half of it on an idle machine
YARDSTICK_S = 5e-3  # what the yardstick takes there


class PacedCore:
    """Gives every row a word a step, and takes the next step only when all readers have seen the last one: no chunk is merged."""

    def __init__(self) -> None:
        self.seen = 0  # events that have arrived, all readers together
        self.clock = 0  # of the event loop's thread
        self.seconds = 0.0
        self._rows: dict[str, Request] = {}
        self._sent: dict[str, int] = {}
        self._step = 0

    @property
    def has_work(self) -> bool:
        return bool(self._rows)

    def add_request(self, request: Request) -> None:
        self._rows[request.request_id] = request

    def abort(self, request_id: str) -> None:
        self._rows.pop(request_id, None)

    def stats(self, now: float | None = None) -> EngineStats:
        return EngineStats()

    def close(self) -> None:
        """Nothing to save."""

    def interrupt(self) -> None:
        """No step takes long."""

    def resume(self) -> None: ...

    def step(self, now: float) -> list[TokenDelta]:
        if len(self._rows) < READERS and not self._step:
            return []  # they start together
        while self.seen < READERS * self._step:
            time.sleep(2e-4)
        if self._step in (MEASURED.start, MEASURED.stop):
            self.seconds = time.clock_gettime(self.clock) - self.seconds
        self._step += 1
        if self._step < STEPS:
            return [TokenDelta(name, 0, [65], ' "word"', [-1]) for name in self._rows]
        rows, self._rows = self._rows, {}
        return [TokenDelta(name, 0, [65], " end", [-1], None, "length", stats=SpeculationStats()) for name in rows]


class Site:
    """uvicorn in a thread, as `serve` sets it up, and the clients."""

    def __init__(self, fake: FakeEngine) -> None:
        self.core = PacedCore()
        parts = vars(fake.engine) | {"core": self.core, "config": EngineConfig()}
        self._engine = AsyncEngine(cast(Any, SimpleNamespace(**parts)))
        self._listener = listen("127.0.0.1", 0)
        self._web = uvicorn.Server(
            uvicorn.Config(create_app(self._engine, ServerConfig()), http=Connection, ws="none", lifespan="off", log_config=None)
        )

    async def serve(self) -> None:
        self.core.clock = time.pthread_getcpuclockid(threading.get_ident())
        await self._engine.start()
        await self._web.serve([self._listener])
        await self._engine.stop()

    def read_streams(self, path: str, body: dict[str, Any]) -> list[bytes]:
        """What 32 clients that ask the same get."""
        raw = json.dumps(body | {"stream": True, "max_tokens": STEPS, "ignore_eos": True}).encode()
        headers = ("Host: x", "Connection: close", "Content-Type: application/json", f"Content-Length: {len(raw)}")
        head = "\r\n".join((f"POST {path} HTTP/1.1", *headers, "", ""))
        got: dict[socket.socket, bytearray] = {}
        with selectors.DefaultSelector() as ready:
            for _ in range(READERS):
                client = socket.create_connection(self._listener.getsockname())
                client.sendall(head.encode() + raw)
                ready.register(client, selectors.EVENT_READ)
                got[client] = bytearray()
            while ready.get_map():
                for key, _ in ready.select(30):
                    client = cast(socket.socket, key.fileobj)
                    if data := client.recv(1 << 16):
                        self.core.seen += data.count(b"word")
                        got[client] += data
                    else:
                        ready.unregister(client)
                        client.close()
        return [bytes(answer) for answer in got.values()]

    def __enter__(self) -> Site:
        self._thread = threading.Thread(target=lambda: asyncio.run(self.serve()))
        self._thread.start()
        while not self._web.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._web.should_exit = True
        self._thread.join()


def yardstick() -> float:
    """Seconds of processor time for work that stays the same: a machine that is slow just now is slow here too."""
    chunk = {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {"content": " word"}, "finish_reason": None}]}
    times: list[float] = []
    for _ in range(3):
        started = time.thread_time()
        for _ in range(1000):
            json.loads(json.dumps(chunk))
        times.append(time.thread_time() - started)
    return min(times)


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="no clock of a single thread here")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi", "stream_options": {"include_usage": True}}),
    ],
)
def test_a_chunk_costs_the_loop_little(fake: FakeEngine, path: str, body: dict[str, Any]) -> None:
    costs: list[float] = []
    while len(costs) < ROUNDS and min(costs, default=1.0) > MAX_SECONDS_PER_CHUNK:
        with Site(fake) as site:
            answers = site.read_streams(path, body)
        assert all(answer.count(b"word") == STEPS - 1 and answer.count(b"[DONE]") == 1 for answer in answers)
        costs.append(site.core.seconds / (READERS * len(MEASURED)) / max(1.0, yardstick() / YARDSTICK_S))
    assert min(costs) <= MAX_SECONDS_PER_CHUNK, [f"{cost * 1e6:.1f} us" for cost in costs]
