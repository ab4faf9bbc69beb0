"""The routes of /v1/responses: making a response, and what can be done with one that is kept or being written."""

import logging
import sqlite3
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from ..errors import ApiError
from ..json_answer import JsonAnswer
from ..serving import Serving
from .create import Responses, followed
from .store import ChainTooLong, Kept, NotKept

logger = logging.getLogger("foretoken.server")

PATH = "/v1/responses"
MAX_PAGE, PAGE = 100, 20


def add_responses(app: FastAPI, serving: Serving) -> Responses:
    """Whoever runs the app closes what this returns. Raises ConfigError if the store cannot be opened."""
    responses = Responses(serving)
    background = responses.background

    async def kept(request: Request, id: str) -> Kept:
        if responses.store is not None:
            try:
                return await responses.store.get(request.state.tenant, id)
            except NotKept:
                pass
        raise _not_found(id)

    @app.post(PATH, response_model=None)
    async def create(request: Request) -> Response:
        return await responses.create(request)

    @app.post(PATH + "/input_tokens")
    async def input_tokens(request: Request) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": await responses.count_input(request)}

    @app.get(PATH + "/{response_id}", response_model=None)
    async def retrieve(request: Request, response_id: str) -> Response:
        run = background.get(request.state.tenant, response_id)
        stream, after = request.query_params.get("stream", "false"), _number(request, "starting_after", -1, 0, 2**53)
        if stream not in ("true", "false"):
            raise ApiError(400, "stream must be true or false", param="stream")
        if stream == "true":
            if run is not None and run.log is not None:
                return followed(run, after + 1)
            await kept(request, response_id)
            message = "only responses made with background and stream can be streamed again, until some minutes after their end"
            raise ApiError(400, message, param="stream", code="events_not_kept")
        if run is not None and not run.done:
            return JsonAnswer(run.answer.writer.snapshot())
        return JsonAnswer((await kept(request, response_id)).response)

    @app.delete(PATH + "/{response_id}")
    async def delete(request: Request, response_id: str) -> dict[str, Any]:
        if (run := background.get(request.state.tenant, response_id)) is not None:
            await background.cancel(run)
            background.forget(run)
        await kept(request, response_id)
        assert responses.store is not None, "a kept response without a store"
        try:
            await responses.store.delete(request.state.tenant, response_id)
        except sqlite3.OperationalError as error:  # a full disk
            logger.error("the response %s could not be deleted: %s", response_id, error)
            message = "the response is still there: the store cannot be written to; try again later"
            raise ApiError(503, message, type="service_unavailable_error", code="store_not_writable") from None
        return {"id": response_id, "object": "response", "deleted": True}

    @app.post(PATH + "/{response_id}/cancel", response_model=None)
    async def cancel(request: Request, response_id: str) -> Response:
        """One that has ended already is returned as it is."""
        if (run := background.get(request.state.tenant, response_id)) is not None:
            return JsonAnswer(await background.cancel(run))
        response = (await kept(request, response_id)).response
        if not response["background"]:
            message = "only a response made with background: true can be cancelled; to end another one, close its connection"
            raise ApiError(400, message, param="response_id", code="not_in_background")
        return JsonAnswer(response)

    @app.get(PATH + "/{response_id}/input_items")
    async def input_items(request: Request, response_id: str) -> dict[str, Any]:
        """The conversation that the response answers, earlier responses included."""
        limit, order = _number(request, "limit", PAGE, 1, MAX_PAGE), request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise ApiError(400, "order must be asc or desc", param="order")
        of_response = await kept(request, response_id)
        items = [*await _before(request, of_response), *of_response.input]
        by_id = {item["id"]: item for item in (items if order == "asc" else reversed(items))}
        ids = list(by_id)
        if (after := request.query_params.get("after")) is not None:
            if after not in by_id:
                raise ApiError(400, f"there is no item {after[:100]!r} in this response", param="after")
            ids = ids[ids.index(after) + 1 :]
        page = ids[:limit]
        ends = {"first_id": page[0] if page else None, "last_id": page[-1] if page else None}
        return {"object": "list", "data": [by_id[id] for id in page], "has_more": len(ids) > limit} | ends

    async def _before(request: Request, of_response: Kept) -> list[dict[str, Any]]:
        """The items of the responses before, as far as they are kept."""
        if of_response.previous is None or responses.store is None:
            return []
        try:
            chain = await responses.store.chain(request.state.tenant, of_response.previous)
        except (NotKept, ChainTooLong):
            return []
        return [item for turn in chain for item in (*turn.input, *turn.response["output"])]

    return responses


def _not_found(id: str) -> ApiError:
    message = f"Response with id {id[:100]!r} not found"
    return ApiError(404, message, type="not_found_error", param="response_id", code="response_not_found")


def _number(request: Request, name: str, default: int, low: int, high: int) -> int:
    """A number of the query. Raises ApiError."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 16 and low <= int(text) <= high):
        raise ApiError(400, f"{name} must be a number from {low} to {high}", param=name)
    return int(text)
