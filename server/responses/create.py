"""POST /v1/responses: a conversation put together, and its next answer begun, whole, streamed or in the background."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, closing

from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import Response

from ..chat import Chat, read_chat
from ..errors import ApiError, internal_error
from ..json_answer import JsonAnswer
from ..schemas import ChatRequest
from ..serving import Serving
from ..streaming import PING_S, EventStream, aside, comment_ping, unless_gone
from .answer import Answer, encoded, encoded_events
from .background import Background, Run
from .functions import namespaces
from .items import Item, Reference, stored_items
from .request import ResponseRequest, our_names
from .store import NO_STORE, ChainTooLong, Kept, NotKept, ResponseStore
from .truncation import read_within_context
from .writer import Writer

OFF_LOOP_ITEMS = 50
"""Longer conversations are put together in a thread, so that no stream waits for it."""


class Responses:
    """The responses of one server: how they are made, those that run in the background, and the store, if there is one.

    Raises ConfigError if the store cannot be opened.
    """

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        config = serving.config
        self.store = None
        if config.response_store != NO_STORE:
            self.store = ResponseStore(config.response_store, config.max_stored_responses, config.response_ttl_s)
        self.background = Background(encoded)

    async def close(self) -> None:
        """End what runs, and write what is to be kept."""
        await self.background.close()
        if self.store is not None:
            await self.store.close()

    async def create(self, request: Request) -> Response:
        serving = self.serving
        body = await serving.read(request, ResponseRequest)
        model = serving.require_model(body.model)
        options = serving.stream_options(body)
        store = self._store_for(body)
        input, asked = await self._asked(request.state.tenant, body)
        with our_names():
            chat = await self._read(asked, body)
            generation = await serving.generation(request, asked, [chat.prompt.token_ids], chat.params, id_prefix="resp_")
        response = body.described(generation.request_id, model, store is not None, chat.params)
        names = serving.proposer_names if options.include_speculation else None
        writer = Writer(response, chat.new_reply(), serving.token_text, chat.params, names, namespaces(body.tools))
        answer = Answer(generation, writer, store, request.state.tenant, input, body.previous_response_id)
        if body.background:
            request.state.generation = None  # for the log: it is not over when this request is
            return await self._in_background(answer, bool(body.stream))
        if body.stream:
            return EventStream(generation, encoded_events(answer.events()))
        with closing(generation):
            whole = await unless_gone(request.receive, answer.whole())
            return await aside(generation, lambda: JsonAnswer(whole))

    async def count_input(self, request: Request) -> int:
        """The tokens of the prompt that the same request would make."""
        body = await self.serving.read(request, ResponseRequest)
        self.serving.require_model(body.model)
        _, asked = await self._asked(request.state.tenant, body)
        with our_names():
            return len((await self._read(asked, body)).prompt.token_ids)

    def _store_for(self, body: ResponseRequest) -> ResponseStore | None:
        """None if it is not to be stored. Raises ApiError if it is, and cannot be."""
        if body.store or body.background:
            self._require_store("store" if body.store else "background")
        return None if body.store is False else self.store

    def _require_store(self, param: str) -> ResponseStore:
        if self.store is None:
            raise ApiError(400, f"{param}: this server stores no responses", param=param, code="unsupported_parameter")
        return self.store

    async def _asked(self, tenant: str, body: ResponseRequest) -> tuple[list[Item], ChatRequest]:
        """The items that the request brings, and the whole conversation as a request for chat completions."""
        if not (body.input or body.previous_response_id):
            raise ApiError(400, "input is needed where no previous_response_id is given", param="input")
        turns = await self._turns(tenant, body.previous_response_id)
        input = await self._resolved(tenant, body.input)

        def work() -> ChatRequest:
            earlier = stored_items([item for turn in turns for item in (*turn.input, *turn.response["output"])])
            return body.chat([*earlier, *input])

        return input, await self.serving.in_reader(work, len(turns) + len(input) >= OFF_LOOP_ITEMS)

    async def _turns(self, tenant: str, previous: str | None) -> list[Kept]:
        """The responses that the request goes on with, first one first."""
        if previous is None:
            return []
        param = "previous_response_id"
        try:
            chain = await self._require_store(param).chain(tenant, previous)
        except NotKept as error:
            lost = "" if error.args[0] == previous else f": {error.args[0]}, which it follows, is not there any more"
            message = f"Previous response with id {previous!r} not found{lost}"
            raise ApiError(400, message, param=param, code="previous_response_not_found") from None
        except ChainTooLong:
            message = "the conversation is too long to be read back: begin a new one, with a summary of it as input"
            raise ApiError(400, message, param=param, code="context_length_exceeded") from None
        if chain[-1].response["status"] in ("queued", "in_progress"):
            raise ApiError(400, f"the response {previous!r} is not finished yet", param=param, code="response_not_finished")
        return chain

    async def _resolved(self, tenant: str, items: Sequence[Item | Reference]) -> list[Item]:
        """The items with those of earlier responses in place of references to them."""
        wanted = [item.id for item in items if isinstance(item, Reference)]
        if not wanted:
            return [item for item in items if not isinstance(item, Reference)]
        try:
            found = await self._require_store("input").items(tenant, wanted)
        except NotKept as error:
            message = f"Item with id {error.args[0]!r} not found: it is not stored (any more); send the item itself"
            raise ApiError(400, message, param="input", code="item_not_found") from None
        except ChainTooLong:
            raise ApiError(400, "too many item_reference items; use previous_response_id", param="input") from None
        return [stored_items([found[item.id]])[0] if isinstance(item, Reference) else item for item in items]

    async def _read(self, asked: ChatRequest, body: ResponseRequest) -> Chat:
        return await (read_within_context if body.truncation == "auto" else read_chat)(asked, self.serving)

    async def _in_background(self, answer: Answer, streamed: bool) -> Response:
        response, run = answer.writer.response, Run(answer, streamed)
        response["status"] = "queued"
        try:
            if not await answer.keep(running=True):
                raise internal_error(response["id"])
        except BaseException:
            answer.generation.close()
            raise
        told = dict(response)
        self.background.start(run)
        return followed(run, 0) if streamed else JsonAnswer(told)


def followed(run: Run, number: int) -> Response:
    """The events of a response in the background from `number` on. A client that leaves ends nothing."""

    async def events() -> AsyncGenerator[bytes]:
        async with aclosing(run.follow(number)) as kept:
            async for one in kept:
                yield one
        if run.log is None:
            message = "the events of this response are no longer kept; get it without stream"
            yield encoded({"type": "error", "sequence_number": number, "code": "events_not_kept", "message": message, "param": None})

    return EventSourceResponse(events(), ping=PING_S, ping_message_factory=comment_ping, sep="\n")
