"""A client that measures: timed requests to any OpenAI-compatible server.

It speaks HTTP/1.1 over asyncio's own streams. A client that parses more costs the server's cores as much as the server itself when
both run on one machine and 32 answers stream at once. One connection a request.
"""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from ..tls import UNTRUSTED

T = TypeVar("T")

MAX_LINE = 1 << 20
DEFAULT_PORTS = {"http": 80, "https": 443}


class ServerFailed(Exception):
    """A server is not there, refuses, or does not answer as it should. The message names it and says what to do."""

    def __init__(self, message: str, status: int | None = None, retry_after_s: float | None = None) -> None:
        """status: of the HTTP answer, where there was one. retry_after_s: what the server asks a client to wait."""
        super().__init__(message)
        self.status, self.retry_after_s = status, retry_after_s


class Unreachable(ServerFailed):
    """Nothing takes connections at the address."""


@dataclass(frozen=True)
class Answer:
    """One answer in full and its times, in seconds from before the connection was opened."""

    seconds: float
    tokens: int  # of output, as the server's usage says
    prompt_tokens: int
    text: str
    arrivals: tuple[float, ...] = ()  # of each piece of text, if streamed

    @property
    def chunks(self) -> int:
        return len(self.arrivals)

    @property
    def first_s(self) -> float | None:
        return self.arrivals[0] if self.arrivals else None

    @property
    def last_s(self) -> float | None:
        return self.arrivals[-1] if self.arrivals else None

    @property
    def token_s(self) -> float | None:
        """Seconds a token after the first text. An answer in one piece says nothing about them: least of all that they are zero."""
        return (self.arrivals[-1] - self.arrivals[0]) / (self.tokens - 1) if self.chunks > 1 and self.tokens > 1 else None


class LoadClient:
    """Requests to the server at base_url (with or without /v1)."""

    def __init__(self, base_url: str, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        """Raises ServerFailed for what is no http(s) URL."""
        self.url = base_url.rstrip("/").removesuffix("/v1")
        advice = f"{base_url!r} is no address of a server: write it as http://HOST:PORT"
        try:
            parts = urlsplit(self.url)
            host, port = parts.hostname, parts.port
        except ValueError as error:  # brackets without an address in them, a port above 65535
            raise ServerFailed(advice) from error
        if host is None or parts.scheme not in DEFAULT_PORTS:
            raise ServerFailed(advice)
        self._host, self._port = host, port or DEFAULT_PORTS[parts.scheme]
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = parts.path
        self._headers = f"Host: {parts.netloc}\r\nConnection: close\r\n" + (f"Authorization: Bearer {api_key}\r\n" if api_key else "")
        self._timeout_s = timeout_s

    async def model(self) -> str:
        """Name of the first model that the server lists. Raises ServerFailed."""
        return (await self.models())[0]

    async def models(self) -> list[str]:
        """Names of the models that the server lists, at least one. Raises ServerFailed."""
        listed = _json(self.url, await self._bounded(self._whole("GET", "/v1/models", None)))
        try:
            names = [str(one["id"]) for one in listed["data"]]
        except (KeyError, TypeError):
            names = []
        if not names:
            raise ServerFailed(f"{self.url} lists no model at /v1/models: is it an OpenAI-compatible server?")
        return names

    async def page(self, path: str) -> str:
        """The text that the server gives at a path. Raises ServerFailed."""
        return (await self._bounded(self._whole("GET", path, None))).decode("utf-8", "replace")

    async def complete(self, path: str, request: Mapping[str, Any], stream: bool) -> Answer:
        """POST to /v1/completions or /v1/chat/completions. Raises ServerFailed, and where the answer counts no tokens."""
        answer = await self._bounded(self._streamed(path, request) if stream else self._complete(path, request))
        if not answer.tokens:
            raise ServerFailed(f"{self.url}{path} gave no tokens, or no usage that counts them: speed cannot be told")
        return answer

    async def _complete(self, path: str, request: Mapping[str, Any]) -> Answer:
        started = time.perf_counter()
        body = _json(self.url, await self._whole("POST", path, request))
        seconds = time.perf_counter() - started
        return _answer(seconds, body.get("usage"), _said(body))

    async def _streamed(self, path: str, request: Mapping[str, Any]) -> Answer:
        request = {**request, "stream": True, "stream_options": {"include_usage": True}}
        texts: list[str] = []
        usage: dict[str, Any] | None = None
        arrivals: list[float] = []
        started = time.perf_counter()
        async with aclosing(self._request("POST", path, request)) as pieces:
            buffered = b""
            async for piece in pieces:
                *lines, buffered = (buffered + piece).split(b"\n")
                for line in lines:
                    if not line.startswith(b"data:") or b"[DONE]" in line[:13]:
                        continue
                    event = _json(self.url, line[5:])
                    if text := _said(event):
                        arrivals.append(time.perf_counter() - started)
                        texts.append(text)
                    usage = event.get("usage") or usage
        seconds = time.perf_counter() - started
        return _answer(seconds, usage, "".join(texts), tuple(arrivals))

    async def _bounded(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await asyncio.wait_for(work, self._timeout_s)
        except TimeoutError:
            raise ServerFailed(f"{self.url} did not answer within {self._timeout_s:g} s") from None
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
            raise ServerFailed(f"the connection to {self.url} broke: {str(error) or type(error).__name__}") from error

    async def _whole(self, method: str, path: str, body: Mapping[str, Any] | None) -> bytes:
        async with aclosing(self._request(method, path, body)) as pieces:
            return b"".join([piece async for piece in pieces])

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> AsyncGenerator[bytes, None]:
        """The body of a successful answer, as it comes."""
        content = b"" if body is None else json.dumps(body).encode()
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._ssl, limit=MAX_LINE)
        except ssl.SSLCertVerificationError as error:
            raise ServerFailed(f"{self.url} {UNTRUSTED}") from error
        except OSError as error:
            raise Unreachable(f"no server answers at {self.url} ({error.strerror or error}): start it, or correct the URL") from error
        try:
            kind = "Content-Type: application/json\r\n" if content else ""
            head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}{kind}Content-Length: {len(content)}\r\n\r\n"
            writer.write(head.encode() + content)
            status, headers = await _head(reader, self.url)
            pieces = _body(reader, headers)
            if status != 200:
                reason = _reason(b"".join([piece async for piece in pieces]))
                raise ServerFailed(f"{self.url}{path} answers with status {status}: {reason}", status, _seconds(headers.get("retry-after")))
            async for piece in pieces:
                yield piece
        finally:
            writer.close()
            with suppress(OSError):  # it has said all it had to say
                await writer.wait_closed()


async def _head(reader: asyncio.StreamReader, url: str) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    if not lines[0].startswith("HTTP/1."):
        raise ServerFailed(f"what answers at {url} does not speak HTTP/1.1")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    return int(lines[0].split()[1]), headers


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
    if "chunked" in headers.get("transfer-encoding", "").lower():
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:  # the end of the connection is the end of the body
        while piece := await reader.read(MAX_LINE):
            yield piece


def _seconds(retry_after: str | None) -> float | None:
    """Of a Retry-After header; None without one, or where it is a date."""
    return float(retry_after) if retry_after and retry_after.isdecimal() else None


def _answer(seconds: float, usage: Mapping[str, Any] | None, text: str, arrivals: tuple[float, ...] = ()) -> Answer:
    tokens, prompt_tokens = ((usage or {}).get(name) or 0 for name in ("completion_tokens", "prompt_tokens"))
    return Answer(seconds, tokens, prompt_tokens, text, arrivals)


def _said(body: Mapping[str, Any]) -> str:
    """By all choices together. Some servers have null for none."""
    return "".join(map(_text, body.get("choices") or ()))


def _text(choice: Mapping[str, Any]) -> str:
    """What a choice says, in any of the four shapes: whole or a chunk of it, of a chat or not. Reasoning counts, by both of its names."""
    message = choice.get("delta") or choice.get("message") or choice
    return next(filter(None, map(message.get, ("content", "reasoning", "reasoning_content", "text"))), "")


def _json(url: str, body: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise ServerFailed(f"{url} answers, but not with a JSON object: is it an OpenAI-compatible server?")
    if answer.get("error"):
        raise ServerFailed(f"{url} answers with an error: {_reason(body)}")
    return answer


def _reason(body: bytes) -> str:
    """The message of an error in OpenAI's shape, else the beginning of whatever came."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return " ".join(body.decode("utf-8", "replace").split())[:200] or "no explanation"
