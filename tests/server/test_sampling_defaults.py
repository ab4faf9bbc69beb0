"""Requests that do not say how tokens are chosen have the model's way, under every route."""

from typing import Any

import pytest
from fake_engine import FakeEngine
from starlette.testclient import TestClient

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    "route, body, most",
    [
        ("/v1/chat/completions", CHAT, 9),
        ("/v1/chat/completions", CHAT | {"max_tokens": 20}, 20),
        ("/v1/chat/completions", CHAT | {"max_tokens": -1}, None),
        ("/v1/completions", {"prompt": "Hi"}, 16),
        ("/v1/responses", {"input": "Hi"}, 9),
        ("/v1/messages", CHAT | {"max_tokens": 5}, 5),
    ],
)
def test_what_is_left_out_is_as_the_model_has_it(
    client: TestClient, fake: FakeEngine, route: str, body: dict[str, Any], most: int | None
) -> None:
    fake.sampling |= {"temperature": 0.6, "top_k": 20, "max_tokens": 9}
    by_default, told = (client.post(route, json=body | more) for more in ({}, {"temperature": 0.25}))
    assert by_default.status_code == told.status_code == 200
    found = [(call.params.temperature, call.params.top_k, call.params.max_tokens) for call in fake.calls]
    assert found == [(0.6, 20, most), (0.25, 20, most)]
    assert (by_default.json().get("temperature", 0.6), told.json().get("temperature", 0.25)) == (0.6, 0.25), "as /v1/responses says"


def test_answers_that_the_context_ends_first_are_not_refused(client: TestClient, fake: FakeEngine) -> None:
    fake.sampling["max_tokens"] = 100_000
    assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
    assert fake.calls[0].params.max_tokens is None
