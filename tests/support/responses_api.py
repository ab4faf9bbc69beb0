"""What a client of the Responses API does in tests: ask, be refused, read a stream."""

from typing import Any

import asking
from asking import answer, named_events
from starlette.testclient import TestClient

Event = dict[str, Any]


def create(api: TestClient, input: Any = "Hi", **fields: Any) -> dict[str, Any]:
    return answer(api, "/v1/responses", {"input": input} | fields)


def refusal(api: TestClient, input: Any = "Hi", **fields: Any) -> dict[str, Any]:
    return asking.refusal(api, "/v1/responses", {"input": input} | fields)


def stream(api: TestClient, input: Any = "Hi", **fields: Any) -> list[Event]:
    return named_events(api, "/v1/responses", {"input": input} | fields)


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}} | more
