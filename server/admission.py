"""The door: every HTTP exchange gets a label, and only callers with a key and a body of bounded size and time come in.

Two plain ASGI layers around the app, so that they hold for every route, known or not. They know nothing of what is asked.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import random
import re
import time
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, internal_error
from .page import PAGE_FILES

logger = logging.getLogger("foretoken.server")

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/metrics", "/ping", *PAGE_FILES})
OWN_DOMAINS = (".localhost", ".local", ".internal", ".home.arpa")  # of no public name; containers know us as host.docker.internal
MAX_HEADERS = 100
MAX_HEADER_BYTES = 64 * 2**10
BODY_DEADLINE_S = 30.0
CLIENT_GONE = 499
_LABELS = random.Random()  # seeded by the system, which need not be asked for each: they are no secret
_LABEL = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Below:
    """Around all: takes the prefix of a proxy off where that left it on, so that paths are the same to whoever reads them."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app, self._root_path = app, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (scope.get("path", "") + "/").startswith(self._root_path + "/"):
            scope["path"] = scope["path"].removeprefix(self._root_path) or "/"
        await self._app(scope, receive, send)


class Labelled:
    """Outermost but for that: x-request-id on every response, each status reported once, and whatever nobody caught becomes a 500."""

    def __init__(self, app: ASGIApp, on_response: Callable[[Scope, int], None]) -> None:
        self._app = app
        self._on_response = on_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        label = given if _LABEL.fullmatch(given) else f"{_LABELS.getrandbits(128):032x}"
        scope.setdefault("state", {}).update(request_id=label, start_time=time.monotonic())
        status = 0

        async def labelled_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = label
            await send(message)

        try:
            await self._app(scope, receive, labelled_send)
        except ApiError as error:
            if not status:
                await error.response()(scope, receive, labelled_send)
        except ClientDisconnect:
            logger.info("the client of request %s has gone", label)
        except Exception:
            logger.exception("request %s failed", label)
            if not status:
                await internal_error(label).response()(scope, receive, labelled_send)
        finally:
            self._on_response(scope, status or CLIENT_GONE)


class Gate:
    """Lets in who has a key (everyone if there are none), and bounds the body's size and arrival time.

    Default deny: paths outside OPEN_PATHS need the key whether they exist or not. Only scope["path"] counts; it cannot be
    bent through the Host header.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_keys: Sequence[str],
        max_body_bytes: int,
        priorities: Sequence[int] = (),
        origins: Sequence[str] | None = None,
    ) -> None:
        """priorities: the best that a request with each of the keys may have; none = 0 for all.

        origins: where there are no keys, the web pages under whose names this server may be asked for beside its own; None = any name.
        """
        self._app = app
        self._names = None if origins is None or "*" in origins else {urlsplit(origin).hostname for origin in origins}
        self._digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]
        self._priorities = priorities or [0] * len(api_keys)
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            tenant, best_priority = self._caller(scope["path"], headers)
            scope.setdefault("state", {}).update(tenant=tenant, best_priority=best_priority)
            self._check_head(headers)
            if not self._digests and scope["path"] not in OPEN_PATHS:
                self._check_name(headers.get("host", ""))
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, self._bounded(receive), send)

    def _caller(self, path: str, headers: Headers) -> tuple[str, int | None]:
        """Whose cache the request may share (with several keys each key has its own), and the best priority it may ask for, None = any.

        Raises ApiError.
        """
        if not self._digests or path in OPEN_PATHS:
            return "", None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")  # as clients of Anthropic's API send it
        digest = hashlib.sha256(key.strip().encode()).digest()
        # Every digest is compared, so that the time says nothing about which key came close.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise ApiError(
                401,
                "Missing or wrong API key; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
                type="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if len(self._digests) == 1:
            return "", self._priorities[0] or None  # nobody to be overtaken, unless one was given
        return digest.hex()[:16], self._priorities[matches.index(True)]

    def _check_head(self, headers: Headers) -> None:
        if len(headers.raw) > MAX_HEADERS or sum(len(name) + len(value) for name, value in headers.raw) > MAX_HEADER_BYTES:
            message = f"more than {MAX_HEADERS} headers, or more than {MAX_HEADER_BYTES:,} bytes of them"
            raise ApiError(431, message, code="headers_too_large", headers={"Connection": "close"})
        if "transfer-encoding" in headers and "content-length" in headers:  # a proxy in front may have seen another request in it
            raise ApiError(400, "Transfer-Encoding and Content-Length exclude each other", headers={"Connection": "close"})
        length = headers.get("content-length", "0")
        if length.isascii() and length.isdigit() and int(length[:20]) > self._max_body_bytes:
            raise self._too_large()

    def _check_name(self, host: str) -> None:
        """A page may have its own name point here, and is of our origin to the browser then: without a key the name is what tells it."""
        if self._names is None or is_own_name(name := _name(host)) or name in self._names:
            return
        message = (
            f"without an API key this server answers under names of this machine only, not as {name[:100]!r}, which may be a web page's: "
            "start it with --api-key, or name the page in --allowed-origins"
        )
        raise ApiError(403, message, type="permission_error", code="unknown_host")

    def _bounded(self, receive: Receive) -> Receive:
        """Chunked bodies declare no length, and a slow sender holds a connection: both are counted as they come."""
        received, complete = 0, False
        deadline = asyncio.get_running_loop().time() + BODY_DEADLINE_S

        async def bounded_receive() -> Message:
            nonlocal received, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                message = f"the request body did not arrive within {BODY_DEADLINE_S:g} s"
                raise ApiError(408, message, code="request_timeout", headers={"Connection": "close"}) from None
            received += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if received > self._max_body_bytes:
                raise self._too_large()
            return message

        return bounded_receive

    def _too_large(self) -> ApiError:
        # The connection stays: closed on a client that still sends, it would take the answer with it. The rest is read, and dropped.
        return ApiError(413, f"the request body is larger than {self._max_body_bytes:,} bytes", code="request_too_large")


def is_own_name(name: str) -> bool:
    """Whether no stranger can have it point here: an address, a name without dots, and what is below OWN_DOMAINS."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        name = name.rstrip(".")
        return "." not in name or name.endswith(OWN_DOMAINS)
    return True


def _name(host: str) -> str:
    """Of a Host header, without the port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:  # half an IPv6 address
        return host
