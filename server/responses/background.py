"""Responses that write themselves while nobody need wait: their tasks, and their events for those who come late.

Owns tasks and logs of events; bounded by the engine's queue (tasks) and by bytes (events). Knows no HTTP.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import closing
from typing import Any

from .answer import Answer
from .writer import Event

MAX_LOG_BYTES = 64 * 2**20
"""Of the events of all responses together."""
KEPT_S = 300.0
"""For so long after a response's end its events can be asked for."""


class Run:
    """One response that writes itself. `log` has its events, encoded, each at its number; None if none are kept (any more)."""

    def __init__(self, answer: Answer, streamed: bool) -> None:
        self.answer = answer
        self.log: list[bytes] | None = [] if streamed else None
        self.num_bytes = 0
        self.done = False
        self.task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    @property
    def id(self) -> str:
        return self.answer.writer.response["id"]

    async def follow(self, number: int) -> AsyncGenerator[bytes]:
        """The events from `number` on, as they come. Ends early if they are no longer kept."""
        while self.log is not None:
            news = self._news
            for event in self.log[number:]:
                number += 1
                yield event
            if self.done and self.log is not None and number >= len(self.log):
                return
            await news.wait()

    def wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


class Background:
    """All runs of a server. encode(event) is how one is kept."""

    def __init__(self, encode: Callable[[Event], bytes]) -> None:
        self._encode = encode
        self._runs: dict[str, Run] = {}
        self._num_bytes = 0

    def start(self, run: Run) -> None:
        """Let the answer be read to its end, whoever leaves."""
        self._runs[run.id] = run
        run.task = asyncio.create_task(self._read(run))

    def get(self, tenant: str, id: str) -> Run | None:
        run = self._runs.get(id)
        return run if run is not None and run.answer.tenant == tenant else None

    async def cancel(self, run: Run) -> dict[str, Any]:
        """End it now, wait until it has said so, and return what there is of the response."""
        run.answer.generation.close()
        if run.task is not None:
            await asyncio.wait({run.task})
        return run.answer.writer.response

    def forget(self, run: Run) -> None:
        self._drop_log(run)
        self._runs.pop(run.id, None)

    async def close(self) -> None:
        """Leave all that still run: who finds one in the store later finds that the server has ended. Those that end are kept."""
        tasks = {run.task: run.answer.generation.finished for run in self._runs.values() if run.task is not None and not run.done}
        for task, finished in tasks.items():
            if not finished:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, run: Run) -> None:
        try:
            with closing(run.answer.generation):
                async for some in run.answer.events():
                    for event in some:
                        self._keep(run, event)
                    run.wake()
        finally:
            run.done = True
            run.wake()
        if run.log is None:
            self.forget(run)
        else:
            asyncio.get_running_loop().call_later(KEPT_S, self.forget, run)

    def _keep(self, run: Run, event: Event) -> None:
        if run.log is None:
            return
        encoded = self._encode(event)
        run.log.append(encoded)
        run.num_bytes += len(encoded)
        self._num_bytes += len(encoded)
        if self._num_bytes > MAX_LOG_BYTES:
            finished = [other for other in self._runs.values() if other.done]
            for other in finished:
                self.forget(other)
            if self._num_bytes > MAX_LOG_BYTES:
                self._drop_log(run)

    def _drop_log(self, run: Run) -> None:
        self._num_bytes -= run.num_bytes
        run.log, run.num_bytes = None, 0
        run.wake()
