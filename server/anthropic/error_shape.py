"""Errors on the routes of Anthropic's API, in its shape, wherever they come from: a plain ASGI layer around everything.

It rewrites the answers that are errors and repeats the request's label under the name that Anthropic's clients look for.
"""

import json
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PATH = "/v1/messages"
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(status: int, message: str, code: str | None, request_id: str | None = None) -> dict[str, Any]:
    """code: what a program may act on, ours or one that Anthropic's clients know."""
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    details = {} if code is None else {"details": {"error_code": code}}
    return {"type": "error", "error": {"type": kind, "message": message} | details, "request_id": request_id}


class AnthropicErrors:
    """Goes around all other layers, so that their refusals have the shape too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (scope["path"] + "/").startswith(PATH + "/"):
            send = _shaped(send)
        await self._app(scope, receive, send)


def _shaped(send: Send) -> Send:
    held: Message | None = None  # the beginning of an error
    raw = b""

    async def shaped_send(message: Message) -> None:
        nonlocal held, raw
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            if "x-request-id" in headers:
                headers["request-id"] = headers["x-request-id"]
            if message["status"] >= 400:
                held = message
                return
        elif held is not None:
            raw += message.get("body", b"")
            if message.get("more_body", False):
                return
            start, held = held, None
            headers = MutableHeaders(scope=start)
            body = _rewritten(raw, start["status"], headers.get("request-id"))
            headers["content-length"] = str(len(body))
            await send(start)
            message = {"type": "http.response.body", "body": body}
        await send(message)

    return shaped_send


def _rewritten(raw: bytes, status: int, request_id: str | None) -> bytes:
    """An error in our own shape as one in Anthropic's; anything else stays."""
    try:
        error = json.loads(raw)["error"]
        body = error_body(status, error["message"], error["code"], request_id)
    except (ValueError, TypeError, KeyError):
        return raw
    return json.dumps(body, ensure_ascii=False).encode()
