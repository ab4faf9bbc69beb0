"""What `foretoken chat` asks an OpenAI-compatible server, and what it makes of the answers. Knows no screen."""

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from ..tls import UNTRUSTED
from .tokens import Token

TIMEOUT = httpx.Timeout(10.0, read=600.0)


class ChatError(Exception):
    """The server refused or failed; the message is the server's, or says what to do."""


class NoServer(ChatError):
    """Nothing answers at the address."""


@dataclass(frozen=True)
class Chunk:
    """One event of a stream."""

    text: str = ""
    reasoning: str = ""
    tokens: tuple[Token, ...] = ()  # empty from servers that do not tell who guessed what
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)  # with the last one
    metrics: dict[str, Any] = field(default_factory=dict)


class ChatClient:
    """One server. base_url: with or without /v1."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        """Raises ChatError for what can be no address or no key."""
        self.url = base_url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        scheme, _, path = self.url.partition("unix:")
        transport, address = (None, self.url) if scheme or not path else (httpx.HTTPTransport(uds=path), "http://localhost")
        try:
            self._client = httpx.Client(base_url=address + "/v1/", headers=headers, timeout=TIMEOUT, transport=transport)
        except httpx.InvalidURL as error:
            raise NoServer(f"{base_url!r} is no address of a server ({error}): write it as http://HOST:PORT") from None
        except UnicodeEncodeError:
            raise ChatError("the API key has characters that no key has") from None
        self._tells_proposers = False

    def close(self) -> None:
        self._client.close()

    def choose_model(self, wanted: str | None) -> str:
        """The wanted one, or the first that the server lists. Raises ChatError."""
        try:
            listed = _json(self._client.get("models"))
            model = listed["data"][0]
            self._tells_proposers = model.get("owned_by") == "foretoken"  # others may refuse what they do not know
            return wanted or str(model["id"])
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        except (LookupError, TypeError, AttributeError):
            if wanted:  # some servers list nothing
                return wanted
            raise ChatError(f"{self.url} lists no model; name one with --model") from None

    def stream(self, request: dict[str, Any]) -> Iterator[Chunk]:
        """The answer as it comes; leaving early ends it at the server, too. Raises ChatError."""
        body = request | {"stream": True, "stream_options": {"include_usage": True}}
        if self._tells_proposers:
            body |= {"stream_options": {"include_usage": True, "include_speculation": True}, "logprobs": True}
        spell = _Spelling()
        try:
            with self._client.stream("POST", "chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                    _json(response)
                for line in response.iter_lines():
                    data = line.removeprefix("data:").strip()
                    if line.startswith("data:") and data != "[DONE]":
                        yield _chunk(_parsed(data), spell)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> ChatError:
        if isinstance(error, httpx.UnsupportedProtocol):
            return NoServer(f"{self.url!r} is no address of a server: write it as http://HOST:PORT")
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return ChatError(f"{self.url} {UNTRUSTED}")
        if isinstance(error, httpx.ConnectError):
            return NoServer(f"no server at {self.url}: start one with `foretoken serve`, or name another with --url")
        if isinstance(error, httpx.TimeoutException):
            return ChatError(f"{self.url} did not answer in time")
        return ChatError(f"the connection to {self.url} broke off ({error or type(error).__name__})")


class _Spelling:
    """Texts of tokens from their bytes: some hold a part of a character only, which the token that completes it gets."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __call__(self, entry: dict[str, Any]) -> str:
        raw = entry.get("bytes")
        return str(entry.get("token", "")) if raw is None else self._decoder.decode(bytes(raw))


def _chunk(body: dict[str, Any], spell: _Spelling) -> Chunk:
    if "error" in body:
        raise ChatError(_message(body))
    usage, metrics = body.get("usage") or {}, body.get("metrics") or {}
    choices = body.get("choices") or []
    if not choices:
        return Chunk(usage=usage, metrics=metrics)
    choice = choices[0]
    delta = choice.get("delta") or {}
    said = (choice.get("logprobs") or {}).get("content") or []
    sources = choice.get("speculation") or []
    tokens = tuple((spell(entry), source.get("proposer")) for entry, source in zip(said, sources, strict=False))
    return Chunk(
        delta.get("content") or "",
        delta.get("reasoning") or delta.get("reasoning_content") or "",
        tokens,
        choice.get("finish_reason"),
        usage,
        metrics,
    )


def _json(response: httpx.Response) -> Any:
    try:
        answer = response.json()
    except ValueError:
        raise ChatError(f"status {response.status_code}, and not JSON: is this an OpenAI-compatible server?") from None
    if response.is_error:
        raise ChatError(_message(answer) if isinstance(answer, dict) and "error" in answer else f"status {response.status_code}")
    return answer


def _parsed(data: str) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except json.JSONDecodeError:
        body = None
    if not isinstance(body, dict):
        raise ChatError("the server sent something that is no JSON object: is this an OpenAI-compatible server?")
    return body


def _message(body: dict[str, Any]) -> str:
    error = body["error"]
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
