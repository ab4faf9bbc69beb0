"""From settings to a running server and, on a signal, to its end: load, announce, serve, drain.

Owns the order of these acts and the process's signals. Knows no endpoint and no tensor.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import logging.config
import os
import secrets
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from ..engine.config import DEMO_MODEL, EngineConfig
from ..engine.model_folder import HUB_ID, config_json, find_adapter, find_folder, weight_files
from .admission import MAX_HEADER_BYTES
from .banner import banner
from .config import ServerConfig
from .connection import Connection
from .exit_status import INTERRUPTED, SOFTWARE
from .listener import allow_many_connections, reachable_from_outside, tell_refused_connections, url
from .loading import Loading, imported, kept, tell
from .logs import log_config
from .responses.store import check_store
from .short_turns import take_short_turns

if TYPE_CHECKING:
    from ..engine.async_engine import AsyncEngine
    from ..engine.boot import Engine

logger = logging.getLogger("foretoken.server")

TICK_S = 1.0  # between looks at whether to end; the Date header needs one a second
KEEP_ALIVE_S = 65  # above the idle time of common proxies, so that it is never we who close under a request
CLOSING_S = 5  # for responses to leave after the last token


def serve(config: ServerConfig, listener: socket.socket) -> int:
    """Load the model, answer on `listener` until a signal, and return the exit status.

    Raises ConfigError (ModelLoadError) before anything is answered.
    """
    logging.config.dictConfig(log_config(config.log_level))
    signal.signal(signal.SIGTERM, _end_at_once)  # until the server takes over; process 1 of a container has no default action
    config, made_key = with_key(config, reachable_from_outside(listener))
    require_folders(config.engine)
    tls = config.tls.context()
    check_store(config.response_store)
    allow_many_connections()
    progress = Loading()
    with progress:
        progress("loading PyTorch")
        with imported(), signals_end_at_once():
            from ..engine.async_engine import AsyncEngine  # these import torch: seconds that a mistake above need not wait for
            from .app import create_app
        with kept():
            engine = load(config, progress)
    driver = AsyncEngine(engine)

    def announce() -> None:
        progress("ready")
        columns = shutil.get_terminal_size().columns if sys.stderr.isatty() else None
        tell("\n".join(banner(config, engine, url(listener, tls is not None), made_key, columns)))

    web = uvicorn.Config(
        create_app(driver, config),
        http=Connection,
        ws="none",
        lifespan="on",
        log_config=None,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSING_S,
    )
    web.load()
    web.ssl = tls  # uvicorn would read the files again, and say less of what is wrong with them
    server = Server(web, driver, config.drain_timeout_s, announce)
    asyncio.run(server.serve(sockets=[listener]))
    return server.status if server.started else SOFTWARE


def load(config: ServerConfig, progress: Loading) -> Engine:
    """The engine, and in its banner what its drafters are worth. Raises ConfigError."""
    from ..engine.boot import boot
    from ..engine.self_test import self_test

    engine = boot(config.engine, progress)
    if not engine.learned:
        return engine
    progress("trying out what guesses")
    return dataclasses.replace(engine, banner=(*engine.banner, *(result.describe() for result in self_test(engine))))


def ending_signals() -> list[signal.Signals]:
    """Those that ask the process to end. A terminal that closes is one, unless `nohup` has it that it is not."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hangs_up else [])]


@contextmanager
def signals_end_at_once() -> Iterator[None]:
    """For imports, which leave nothing half done: what a handler raises, a module that is imported may catch, and the signal be lost."""

    def end(sig: int, frame: FrameType | None) -> None:
        os._exit(128 + sig)

    before = {sig: signal.getsignal(sig) for sig in (signal.SIGINT, signal.SIGTERM)}
    heard = {sig: handler for sig, handler in before.items() if handler is not signal.SIG_IGN}
    for sig in heard:
        signal.signal(sig, end)
    try:
        yield
    finally:
        for sig, handler in heard.items():
            signal.signal(sig, handler)


def _end_at_once(sig: int, frame: FrameType | None) -> None:
    sys.exit(128 + sig)


class Server(uvicorn.Server):
    """uvicorn that lets requests finish: the first signal drains the engine while answers go on, a second one ends them."""

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, drain_timeout_s: float, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._engine = engine
        self._drain_timeout_s = drain_timeout_s
        self._announce = announce
        self._draining: asyncio.Task[None] | None = None
        self._drained = asyncio.Event()
        self.status = 0

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        tell_refused_connections(self._loop)
        ending = ending_signals()
        for sig in ending:
            signal.signal(sig, self.handle_exit)
        await self._engine.start()
        take_short_turns()  # when the engine has its threads, which would inherit it
        try:
            await super().serve(sockets)
        finally:
            await self._engine.stop()
            for sig in ending:
                signal.signal(sig, signal.SIG_IGN)  # we are ending already, and an interrupted exit only prints a traceback

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's handlers would go before the engine has stopped; `serve` has its own for longer."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._announce()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The signal handler: it may interrupt anything, so it only tells the loop."""
        self._loop.call_soon_threadsafe(self._on_signal, signal.Signals(sig).name)

    def _on_signal(self, name: str) -> None:
        if self._draining is None:
            in_flight, timeout_s = self._engine.num_in_flight + self._engine.num_guests, self._drain_timeout_s
            logger.info("%s: %d requests in flight may finish within %g s; a second signal ends them", name, in_flight, timeout_s)
            self._draining = self._loop.create_task(self._drain(timeout_s))
        elif name != "SIGHUP":  # a terminal that closes sends it, and then its shell
            logger.info("%s: ending the requests in flight", name)
            self.status = INTERRUPTED
            self.config.timeout_graceful_shutdown = 1
            self._draining.cancel()
            self._draining = self._loop.create_task(self._drain(0.0))

    async def main_loop(self) -> None:
        """uvicorn's, but it looks once a second, not ten times, and as soon as a drain is over: each look wakes a core."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), TICK_S)

    async def on_tick(self, counter: int) -> bool:
        """Whether to end. An engine that died has failed its requests already; a supervisor restarts us."""
        if not self._engine.healthy:
            logger.error("the engine has stopped working: ending with status %d", SOFTWARE)
            self.status = SOFTWARE
            return True
        return await super().on_tick(counter)

    async def _drain(self, timeout_s: float) -> None:
        self._engine.begin_drain()
        await self._engine.drain(timeout_s)
        self.should_exit = True
        self._drained.set()


def with_key(config: ServerConfig, reachable: bool) -> tuple[ServerConfig, bool]:
    """The settings with a fresh API key if strangers could reach a server without one, and whether one was made."""
    if config.api_keys or config.insecure_no_auth or not reachable:
        return config, False
    return dataclasses.replace(config, api_keys=("ft-" + secrets.token_urlsafe(24),)), True


def require_folders(config: EngineConfig) -> None:
    """Say at once what a loader would find out seconds later. Hub ids pass. Raises ModelLoadError."""
    require_model_folder(config.model.model)
    if config.model.tokenizer is not None and not _is_hub_id(config.model.tokenizer):
        find_folder(config.model.tokenizer, None, lambda line: None)
    for module in config.adapters.modules if config.adapters is not None else ():
        if not _is_hub_id(module.path):
            find_adapter(module.path)


def require_model_folder(model: str) -> None:
    """Raises ModelLoadError."""
    if model == DEMO_MODEL or _is_hub_id(model):
        return
    folder = find_folder(model, None, lambda line: None)
    config_json(folder)
    weight_files(folder)


def _is_hub_id(path: str) -> bool:
    return HUB_ID.fullmatch(path) is not None and not Path(os.path.expanduser(path)).exists()
