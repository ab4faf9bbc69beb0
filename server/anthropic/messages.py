"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API over the same engine, templates and parsers as chat completions."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI
from sse_starlette import ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response

from ...engine.request import TokenDelta
from ..chat import read_chat
from ..generation import Generation
from ..json_answer import JsonAnswer
from ..replies import Reply
from ..serving import Serving
from ..streaming import EventStream, event, failure, unless_gone
from .blocks import BlockEvents, content, ending, usage
from .error_shape import PATH, error_body
from .requests import CountTokensRequest, MessagesRequest, anthropic_names


def add_messages(app: FastAPI, serving: Serving) -> None:
    @app.post(PATH, response_model=None)
    async def messages(request: Request) -> Response:
        body = await serving.read(request, MessagesRequest)
        model = serving.require_model(body.model)
        asked = body.chat()
        with anthropic_names():
            chat = await read_chat(asked, serving)
            # A client may ask for more than any context holds: as at Anthropic, the answer then ends with the context.
            room = serving.engine.engine.intake.max_tokens - len(chat.prompt.token_ids)
            fills_context = body.max_tokens > room
            params = replace(chat.params, max_tokens=None) if fills_context else chat.params
            generation = await serving.generation(request, asked, [chat.prompt.token_ids], params, id_prefix="msg_")
        answer = Answer(generation, chat.new_reply(), model, fills_context)
        if body.stream:
            return EventStream(generation, answer.stream(), ping=_ping)
        with closing(generation):
            return JsonAnswer(await unless_gone(request.receive, answer.whole()))

    @app.post(PATH + "/count_tokens", response_model=None)
    async def count_tokens(request: Request) -> Response:
        body = await serving.read(request, CountTokensRequest)
        serving.require_model(body.model)
        asked = body.chat()
        with anthropic_names():
            chat = await read_chat(asked, serving)
        return JsonAnswer({"input_tokens": len(chat.prompt.token_ids)})


@dataclass(frozen=True)
class Answer:
    """One message in the making."""

    generation: Generation
    reply: Reply
    model: str
    fills_context: bool  # if the answer ends by its length, it is the context's

    async def whole(self) -> dict[str, Any]:
        """Raises ForetokenError."""
        parts: list[dict[str, Any]] = []
        last: TokenDelta | None = None
        async for _, last in self.generation.deltas():
            parts.extend(self._parts(last))
        assert last is not None, "a generation without an end"
        return self._message() | {
            "content": content(parts),
            **self._ending(last),
            "usage": usage(self.generation.usage()),
            "metrics": self.generation.metrics(),
        }

    async def stream(self) -> AsyncGenerator[bytes]:
        """The events, which begin with the first token. A failure on the way is an event too: the status is long sent."""
        blocks = BlockEvents()
        begun = False
        try:
            async with aclosing(self.generation.deltas()) as deltas:
                async for _, delta in deltas:
                    events: list[dict[str, Any]] = []
                    if not begun:
                        begun = True
                        events += [{"type": "message_start", "message": self._message()}, {"type": "ping"}]
                    events += blocks.of(self._parts(delta))
                    if delta.finish_reason is not None:
                        events += [*blocks.end(), *self._last(delta)]
                    if events:
                        yield _named(events)
        except Exception as error:
            told = failure(self.generation, error)
            yield _named([error_body(told.status, told.message, told.code)])

    def _parts(self, delta: TokenDelta) -> list[dict[str, Any]]:
        parts = self.reply.feed(delta)
        self.generation.choices[0].num_reasoning_tokens = self.reply.num_reasoning_tokens
        return parts

    def _message(self) -> dict[str, Any]:
        return {
            "id": self.generation.request_id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage(self.generation.usage()),
        }

    def _last(self, delta: TokenDelta) -> list[dict[str, Any]]:
        totals = usage(self.generation.usage())
        end = {"type": "message_delta", "delta": self._ending(delta), "usage": totals, "metrics": self.generation.metrics()}
        return [end, {"type": "message_stop"}]

    def _ending(self, last: TokenDelta) -> dict[str, Any]:
        return ending(last, self.reply.num_calls, fills_context=self.fills_context)


def _named(events: Sequence[dict[str, Any]]) -> bytes:
    return b"".join(b"event: " + one["type"].encode() + b"\n" + event(one) for one in events)


def _ping() -> ServerSentEvent:
    return ServerSentEvent(data='{"type": "ping"}', event="ping", sep="\n")
