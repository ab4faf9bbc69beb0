"""An answer on its way: a generation read to its end, as one object or as events, and kept before the end is told."""

import logging
import sqlite3
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from ..generation import Generation
from ..streaming import event, failure
from .items import Item, kept
from .store import Kept, ResponseStore
from .writer import Event, Writer

logger = logging.getLogger("foretoken.server")


class Answer:
    """One answer, to these items. store: where it is kept, for its tenant; None = nowhere. previous: the response that it follows."""

    def __init__(
        self, generation: Generation, writer: Writer, store: ResponseStore | None, tenant: str, input: Sequence[Item], previous: str | None
    ) -> None:
        self.generation = generation
        self.writer = writer
        self.tenant = tenant
        self._store = store
        self._input = kept(input) if store is not None else []
        self._previous = previous

    async def keep(self, running: bool = False) -> bool:
        """Whether it is kept now. A response that cannot be written down is told with store: false; the answer is not lost by it."""
        if self._store is None:
            return False
        try:
            await self._store.put(self.tenant, Kept(self.writer.response, self._input, self._previous), running)
        except sqlite3.Error:
            logger.exception("a response could not be stored")
            self.writer.response["store"] = False
        return self.writer.response["store"]

    async def whole(self) -> dict[str, Any]:
        """Raises ForetokenError if it fails; then nothing is kept."""
        async with aclosing(self.generation.deltas()) as deltas:
            async for _, delta in deltas:
                self.writer.write(delta)
        self.writer.finish(self.generation)
        await self.keep()
        return self.writer.response

    async def events(self) -> AsyncGenerator[list[Event]]:
        """All events, in order. A failure is two of them: error, response.failed. The response is kept before the last one."""
        writer, generation = self.writer, self.generation
        yield writer.opening()
        try:
            async with aclosing(generation.deltas()) as deltas:
                async for _, delta in deltas:
                    if events := writer.write(delta):
                        yield events
            ending = writer.finish(generation)
        except Exception as error:
            ending = writer.fail(failure(generation, error), generation)
        await self.keep()
        yield [*ending, writer.last()]


async def encoded_events(events: AsyncGenerator[list[Event]]) -> AsyncGenerator[bytes]:
    async with aclosing(events) as some:
        async for step in some:
            yield b"".join(map(encoded, step))


def encoded(one: Event) -> bytes:
    return f"event: {one['type']}\n".encode() + event(one)
