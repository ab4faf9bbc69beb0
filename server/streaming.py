"""Answers of a running generation: one JSON body, or server-sent events. Either way a client that leaves ends the work."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, closing, suppress
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from pydantic_core import to_json
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..engine.errors import ForetokenError
from ..engine.request import TokenDelta
from .errors import ApiError, from_engine, internal_error
from .generation import Generation, Outlet
from .schemas import StreamOptions

logger = logging.getLogger("foretoken.server")

PING_S = 15
_MARK = "\0"  # stands where a chunk's text comes
_LINE_ENDS = [(end.encode(), b"\\u%04x" % ord(end)) for end in "\x85\u2028\u2029"]

T = TypeVar("T")


class Shape(Protocol):
    """How a route spells choices."""

    @property
    def only_text(self) -> bool: ...  # whether chunks of one choice without logprobs and before its end differ in nothing but their text
    def envelope(self, *, chunk: bool) -> dict[str, Any]: ...  # id, object, created, model
    def opening(self) -> list[dict[str, Any]]: ...  # choices of a stream's first chunks
    def chunks(self, index: int, delta: TokenDelta) -> list[dict[str, Any]]: ...  # the choices of one delta, in order: one a chunk
    def choice(self, index: int, deltas: list[TokenDelta]) -> dict[str, Any]: ...  # a whole choice


async def answer(request: Request, generation: Generation, shape: Shape, stream: bool, options: StreamOptions) -> Response:
    """Run it, and close it. Raises ForetokenError if it fails before anything was sent, ClientDisconnect if nobody waits any more."""
    if stream:
        return EventStream(generation, events(generation, shape, options, request.scope["state"].get("outlet")))
    with closing(generation):
        return Response(await unless_gone(request.receive, whole(generation, shape)), media_type="application/json")


def comment_ping() -> ServerSentEvent:
    return ServerSentEvent(comment="ping", sep="\n")


class EventStream(EventSourceResponse):
    """The events of a generation, which it closes even if the client left before the first of them. ping: what is sent while
    there are none."""

    def __init__(
        self, generation: Generation, content: AsyncGenerator[bytes], ping: Callable[[], ServerSentEvent] = comment_ping
    ) -> None:
        super().__init__(content)
        self._generation, self._content, self._ping_event = generation, content, ping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As the library's, in two tasks for its four, which were a fifth of a short answer's calls. A drain ends streams through the
        engine."""
        outlet: Outlet | None = scope["state"].get("outlet")

        async def write(piece: bytes) -> None:
            if outlet is not None and outlet.is_ready:
                outlet.write_piece(piece)
            else:
                await send({"type": "http.response.body", "body": piece, "more_body": True})

        async def ping() -> None:
            if outlet is None or not outlet.is_paused:  # else the ping might come behind the end
                await write(self._ping_event().encode())

        async def stream() -> None:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async with aclosing(self._content) as pieces:
                async for piece in pieces:
                    await write(piece)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        with closing(self._generation), suppress(ClientDisconnect):
            await unless_gone(receive, stream(), ping)


async def whole(generation: Generation, shape: Shape) -> bytes:
    """The body of an answer that is not streamed."""
    deltas: list[list[TokenDelta]] = [[] for _ in generation.choices]
    async for index, delta in generation.deltas():
        deltas[index].append(delta)
    return await aside(generation, lambda: _body(generation, shape, deltas))


def _body(generation: Generation, shape: Shape, deltas: Sequence[list[TokenDelta]]) -> bytes:
    """Written choice by choice: the log probabilities of all at once, as Python's objects, may be gigabytes."""
    written: list[bytes] = []
    for index, of_choice in enumerate(deltas):
        choice = shape.choice(index, of_choice)
        if len(deltas) > 1:
            choice["speculative_decoding"] = generation.speculative_decoding([generation.choices[index]])
        written.append(to_json(choice))
        of_choice.clear()
    totals = {"usage": generation.usage(), "metrics": generation.metrics()}
    return to_json(shape.envelope(chunk=False))[:-1] + b',"choices":[' + b",".join(written) + b"]," + to_json(totals)[1:]


async def aside(generation: Generation, work: Callable[[], T]) -> T:
    """What `work` returns, done in a thread where tokens have log probabilities: writing those of many takes seconds."""
    params = generation.params
    has_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
    return await asyncio.to_thread(work) if has_logprobs else work()


async def events(generation: Generation, shape: Shape, options: StreamOptions, outlet: Outlet | None = None) -> AsyncGenerator[bytes]:
    """The stream: an opening chunk per choice, one chunk per engine step and choice, the totals, [DONE].

    It opens with the first token, so that a client's time to the first event is what it takes it for. A failure on the way
    is an event with an error; the status is long sent. outlet: where chunks can go past this generator, while it waits for them.
    """
    chunks = Chunks(generation, shape, options)
    opening = shape.opening()
    ending = b""  # which goes in one piece
    if outlet is not None:
        generation.tap(outlet, chunks)
    try:
        async with aclosing(generation.deltas()) as deltas:
            async for index, delta in deltas:
                while opening:
                    yield chunks.of([opening.pop(0)])
                if delta.prompt_logprobs is None:
                    said = chunks(index, delta)
                else:
                    said = await asyncio.to_thread(chunks, index, delta)  # a whole prompt's take up to seconds
                if generation.finished:
                    ending = said
                elif said:
                    yield said
        if options.include_usage:
            ending += chunks.of([], usage=generation.usage(), metrics=generation.metrics())
    except Exception as error:
        ending += event(failure(generation, error).body)
    yield ending + b"data: [DONE]\n\n"


def failure(generation: Generation, error: Exception) -> ApiError:
    """What a stream tells of an error on the way: the status is long sent."""
    if isinstance(error, ForetokenError):
        return from_engine(error)
    logger.error("stream %s failed", generation.request_id, exc_info=error)
    return internal_error(generation.request_id)


class Chunks:
    """Spells a stream's chunks. Most differ from the one before in their text alone: the bytes around it are kept."""

    def __init__(self, generation: Generation, shape: Shape, options: StreamOptions) -> None:
        self._generation = generation
        self._shape = shape
        self._options = options
        self._envelope = shape.envelope(chunk=True)
        if options.include_usage or options.continuous_usage_stats:
            self._envelope["usage"] = None
        self._only_text = shape.only_text and not (options.include_speculation or options.continuous_usage_stats)
        self._around: dict[int, tuple[bytes, bytes]] = {}  # by choice

    def __call__(self, index: int, delta: TokenDelta) -> bytes:
        """The chunks of one delta, which `generation` has taken in."""
        if self._only_text and delta.logprobs is None and delta.finish_reason is None:
            around = self._around.get(index)
            if around is None:
                around = self._around[index] = self._split(index, delta)
            return around[0] + _json(delta.text) + around[1]
        whole = delta.logprobs is None or self._generation.params.include_stop_str_in_output
        parts = [delta] if whole else _end_apart(delta)
        chunks = [chunk for part in parts for chunk in self._shape.chunks(index, part)]
        if not chunks:
            return b""
        *before, last = chunks
        more: dict[str, Any] = {}
        if self._options.continuous_usage_stats:
            more["usage"] = self._generation.usage()
        if self._generation.finished and not self._options.include_usage:
            more["metrics"] = self._generation.metrics()
        return b"".join([self.of([choice]) for choice in before]) + self.of([last], **more)

    def of(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return event(self._envelope | {"choices": choices} | more)

    def _split(self, index: int, delta: TokenDelta) -> tuple[bytes, bytes]:
        marked = self.of(self._shape.chunks(index, replace(delta, text=_MARK)))
        before, mark, after = marked.rpartition(_json(_MARK))  # from the right: the envelope holds names of the user's
        assert mark, "a chunk without its text"
        return before, after


def _end_apart(delta: TokenDelta) -> list[TokenDelta]:
    """The token that ends an answer behind the others: it has no text, and clients take the tokens of a chunk for its text."""
    if delta.finish_reason != "stop" or isinstance(delta.stop_reason, str) or not delta.text:
        return [delta]
    said, end = slice(None, -1), slice(-1, None)
    logprobs = delta.logprobs or []
    first = replace(
        delta, token_ids=delta.token_ids[said], sources=delta.sources[said], logprobs=logprobs[said], finish_reason=None, stop_reason=None
    )
    last = replace(
        delta, text="", token_ids=delta.token_ids[end], sources=delta.sources[end], logprobs=logprobs[end], prompt_logprobs=None
    )
    return [first, last]


def event(payload: dict[str, Any]) -> bytes:
    return b"data: " + _json(payload) + b"\n\n"


def _json(value: object) -> bytes:
    """On one line for those too who, as httpx's iter_lines, end lines at characters where server-sent events do not."""
    text = to_json(value)  # a fifth of the time that Python's own takes
    if not text.isascii():
        for end, escaped in _LINE_ENDS:
            text = text.replace(end, escaped)
    return text


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T], ping: Callable[[], Awaitable[None]] | None = None) -> T:
    """The result of `work`, which is cancelled if the client leaves: servers do not cancel handlers by themselves. ping: what is done
    every PING_S meanwhile.

    Raises ClientDisconnect then. The request's body must have been read.
    """
    task, gone = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        while not (await asyncio.wait({task, gone}, timeout=ping and PING_S, return_when=asyncio.FIRST_COMPLETED))[0]:
            assert ping is not None, "a wait without an end has ended"
            await ping()
        if task.done():
            return task.result()
        raise ClientDisconnect()
    finally:
        task.cancel()
        gone.cancel()
        if not task.done():  # else nothing holds the answer up: who only listens ends by itself
            await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
