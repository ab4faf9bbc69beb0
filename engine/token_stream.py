"""What the engine gives for one API request, on its way to the one who reads it.

Owns deltas that nobody has fetched yet. Knows no thread: the engine puts, the reader iterates.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

from .request import TokenDelta

MAX_PENDING = 64
"""Deltas of one choice that wait one by one; more are merged, so that a reader who sleeps costs little beside the text itself."""


class TokenStream:
    """The deltas of one API request, for one reader: an async iterator that ends when every choice has its finish_reason.

    What the reader has not fetched in time comes as one delta per choice. Closing, cancelling or dropping the stream aborts
    the choices that have not ended. Raises RequestFailed or EngineDead if the engine gives them up.
    """

    def __init__(self, request_ids: Sequence[str], abort: Callable[[Sequence[str]], None], slot: int = 0) -> None:
        """slot: of the adapter that its requests run with, 0 = none."""
        self.slot = slot
        self._unfinished = set(request_ids)
        self._abort = abort
        self._pending: dict[str, list[TokenDelta]] = {}  # by request id, in order of arrival
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None  # of the reader who waits
        self._tap: Callable[[TokenDelta], bool] | None = None

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenDelta:
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self._unfinished:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            except asyncio.CancelledError:
                self.close()
                raise
        return merge(self._pending.pop(next(iter(self._pending))))

    def close(self) -> None:
        """Abort what has not ended; nothing more comes."""
        self._pending.clear()
        self._tap = None
        unfinished, self._unfinished = self._unfinished, set[str]()
        if unfinished:
            self._abort(sorted(unfinished))
        self._wake()

    def __del__(self) -> None:
        if self._unfinished:
            self._abort(sorted(self._unfinished))

    def tap(self, tap: Callable[[TokenDelta], bool]) -> None:
        """While the reader waits with nothing pending, offer each delta that ends no choice to `tap`; what it takes (True) never reaches
        the reader, whose waking costs more than all else that is done for a delta. It must not raise."""
        self._tap = tap

    def put(self, delta: TokenDelta) -> None:
        """Called by the engine, on the loop."""
        if delta.finish_reason is not None:
            self._unfinished.discard(delta.request_id)
        elif self._tap is not None and self._reader is not None and not self._reader.done() and self._tap(delta):
            return
        waiting = self._pending.get(delta.request_id)
        if waiting is None:
            self._pending[delta.request_id] = [delta]
        else:
            waiting.append(delta)
            if len(waiting) > MAX_PENDING:
                waiting[:] = [merge(waiting)]
        self._wake()

    def fail(self, error: Exception) -> None:
        """Called on the loop: after what is pending, the reader gets this error. Nothing changes if every choice has ended."""
        if not self._unfinished:
            return
        self._error = error
        unfinished, self._unfinished = self._unfinished, set[str]()
        self._abort(sorted(unfinished))
        self._wake()

    def _wake(self) -> None:
        """Let the reader look again."""
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)


def merge(deltas: Sequence[TokenDelta]) -> TokenDelta:
    """Successive deltas of one choice as one."""
    if len(deltas) == 1:
        return deltas[0]
    logprobs = [said for delta in deltas for said in delta.logprobs or ()]
    return dataclasses.replace(
        deltas[-1],
        token_ids=[token for delta in deltas for token in delta.token_ids],
        text="".join(delta.text for delta in deltas),
        sources=[source for delta in deltas for source in delta.sources],
        logprobs=logprobs if any(delta.logprobs is not None for delta in deltas) else None,
        prompt_logprobs=deltas[0].prompt_logprobs,
        num_passes=sum(delta.num_passes for delta in deltas),
    )
