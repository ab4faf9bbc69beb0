"""Errors on Anthropic's routes have its shape, wherever they come from; those of all other routes keep OpenAI's."""

import json
from typing import Any

import pytest
from fake_engine import FakeEngine
from starlette.testclient import TestClient

from foretoken.engine.errors import EngineDead, QueueFull, RequestFailed

ROUTE = "/v1/messages"
ASK = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}


def error(answer: Any, status: int) -> dict[str, Any]:
    """The error of an answer, which must be one of Anthropic's with this status."""
    body = answer.json()
    assert answer.status_code == status, answer.text
    assert body.keys() == {"type", "error", "request_id"} and body["type"] == "error"
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    assert int(answer.headers["content-length"]) == len(answer.content)
    return body["error"]


@pytest.mark.parametrize(
    ("raised", "status", "kind"),
    [
        (QueueFull("the queue is full", 4), 503, "overloaded_error"),
        (RequestFailed("not finite", "numerical_error"), 500, "api_error"),
        (RequestFailed("too slow", "timeout"), 504, "timeout_error"),
        (RequestFailed("the drain is over", "server_shutdown"), 503, "overloaded_error"),
        (EngineDead("gone"), 503, "overloaded_error"),
        (ZeroDivisionError("secret"), 500, "api_error"),
    ],
)
def test_failures(client: TestClient, fake: FakeEngine, raised: Exception, status: int, kind: str) -> None:
    fake.error = raised
    answer = client.post(ROUTE, json=ASK)
    told = error(answer, status)
    assert told["details"]["error_code"]
    assert told["type"] == kind and "secret" not in answer.text
    assert answer.headers.get("retry-after") == {"server_is_overloaded": "4", "server_shutdown": "1"}.get(told["details"]["error_code"])


def test_a_failure_on_the_way_is_an_event(client: TestClient, fake: FakeEngine) -> None:
    fake.fails_after = 2
    events = client.post(ROUTE, json=ASK | {"stream": True}).text.strip().split("\n\n")
    name, data = events[-1].split("\n")
    assert name == "event: error"
    told = {"type": "api_error", "message": "not finite", "details": {"error_code": "numerical_error"}}
    assert json.loads(data.removeprefix("data: "))["error"] == told
    assert not any(event.startswith("event: message_stop") for event in events)
    assert client.post(ROUTE, json=ASK).status_code == 500 and fake.num_open == 0


def test_refusals_of_all_layers(fake: FakeEngine) -> None:
    client = fake.client(max_body_bytes=100)
    assert error(client.post(ROUTE, json=ASK | {"model": "other", "max_tokens": 1}), 404)["type"] == "not_found_error"
    assert error(client.post(ROUTE, json=ASK | {"system": "a" * 100}), 413)["type"] == "request_too_large"
    assert error(client.post(ROUTE, content="{", headers={"Content-Type": "application/json"}), 400)["type"] == "invalid_request_error"
    assert error(client.post(ROUTE, content="x"), 415)["type"] == "invalid_request_error"
    assert error(client.get(ROUTE), 405)["message"] == "/v1/messages does not take GET"
    assert error(client.post(ROUTE + "/batches", json={}), 404)["type"] == "not_found_error"
    assert client.get("/v1/messagesx").json()["error"]["code"] == "not_found"
    assert "request-id" not in client.get("/v1/messagesx").headers


def test_a_key_may_come_as_anthropics_clients_send_it(fake: FakeEngine) -> None:
    client = fake.client(api_keys=("first", "second"))
    assert error(client.post(ROUTE, json=ASK), 401)["type"] == "authentication_error"
    assert error(client.post(ROUTE, json=ASK, headers={"x-api-key": "third"}), 401)["type"] == "authentication_error"
    wrong = {"x-api-key": "first", "Authorization": "Bearer third"}  # the bearer's word counts
    assert error(client.post(ROUTE, json=ASK, headers=wrong), 401)["type"] == "authentication_error"
    for headers in ({"x-api-key": "second"}, {"Authorization": "Bearer second"}, {"x-api-key": "second", "Authorization": "Basic eA=="}):
        assert client.post(ROUTE, json=ASK, headers=headers).status_code == 200
    assert len({call.salt for call in fake.calls}) == 1  # one caller, however the key came
    openai = client.post("/v1/chat/completions", json={"messages": ASK["messages"]})
    assert openai.status_code == 401 and openai.json()["error"]["code"] == "invalid_api_key"
