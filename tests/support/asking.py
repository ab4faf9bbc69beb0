"""What a client over HTTP does in tests: ask, be refused, read a stream."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI
from starlette.testclient import TestClient

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


def answer(client: TestClient, route: str, body: Mapping[str, Any], status: int = 200) -> dict[str, Any]:
    response = client.post(route, json=body)
    assert response.status_code == status, response.text
    return response.json()


def refusal(client: TestClient, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
    return answer(client, route, body, 400)["error"]


def chunks(client: TestClient, route: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, which must end with [DONE]."""
    response = client.post(route, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def named_events(client: TestClient, route: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those of a stream in which every event's name is its type."""
    response = client.post(route, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_of(response.text)


def events_of(text: str) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for block in text.split("\n\n"):
        if block and not block.startswith(":"):
            name, data = block.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return events


def posted(app: FastAPI, path: str, receive: Callable[[], Awaitable[Any]], is_read: bool = True) -> list[dict[str, Any]]:
    """One POST by bare ASGI: what was sent to a client that reads it, or does not."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        if not is_read:
            await asyncio.Event().wait()
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b"", "app": app}

    async def run() -> None:
        await asyncio.wait_for(app(scope, receive, send), 5)

    asyncio.run(run())
    return sent
