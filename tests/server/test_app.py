import threading
from typing import Any

import pytest
from asking import CHAT
from fake_engine import FakeEngine
from starlette.testclient import TestClient

from foretoken.engine.errors import ContextTooLong, EngineDead, InvalidRequest, QueueFull, ShuttingDown


def error_of(response: Any) -> dict[str, Any]:
    """The error, after checking that the body is OpenAI's shape and nothing else."""
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}, body
    assert response.headers["x-request-id"]
    return body["error"]


def test_models_lists_the_served_name(client: TestClient) -> None:
    models = client.get("/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["tiny"]
    assert client.get("/v1/models/tiny").json() == models["data"][0]
    assert models["data"][0]["max_model_len"] == 512


def test_served_names_with_slashes_replace_the_model_name(fake: FakeEngine) -> None:
    client = fake.client(served_model_names=("org/model", "alias"))
    assert client.get("/v1/models/org/model").json()["id"] == "org/model"
    assert client.post("/v1/chat/completions", json=CHAT | {"model": "alias"}).json()["model"] == "alias"
    assert client.post("/v1/chat/completions", json=CHAT | {"model": "tiny"}).status_code == 404


def test_a_wrong_model_is_a_404_that_names_the_right_one(client: TestClient) -> None:
    response = client.post("/v1/chat/completions", json=CHAT | {"model": "gpt-5"})
    error = error_of(response)
    assert response.status_code == 404 and error["code"] == "model_not_found" and error["param"] == "model"
    assert "tiny" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"), ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"), ("GET", "/v1/models/", 404, "model_not_found"),
        ("GET", "/docs", 404, "not_found"), ("GET", "/redoc", 404, "not_found"),
    ],
)
def test_wrong_routes_have_the_one_error_shape(client: TestClient, method: str, path: str, status: int, code: str) -> None:
    response = client.request(method, path)
    assert (response.status_code, error_of(response)["code"]) == (status, code)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequest("no", "seed"), 400, None),
        (ContextTooLong("prompt has 9 tokens, limit is 8"), 400, "context_length_exceeded"),
        (QueueFull("the queue is full", 7), 503, "server_is_overloaded"),
        (ShuttingDown("the server drains"), 503, "server_shutdown"),
        (EngineDead("/secret/path 0xdeadbeef"), 503, "engine_dead"),
        (RuntimeError("/secret/path 0xdeadbeef"), 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_engine_errors_become_http(
    fake: FakeEngine, client: TestClient, error: Exception, status: int, code: str | None, stream: bool
) -> None:
    fake.error = error
    response = client.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    assert (response.status_code, error_of(response)["code"]) == (status, code)
    assert "secret" not in response.text and "0xdead" not in response.text
    if isinstance(error, QueueFull):
        assert response.headers["retry-after"] == "7"
    if isinstance(error, RuntimeError):
        assert response.headers["x-request-id"] in response.text


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),  # a base URL without /v1
        ("/v1/v1/messages", "/v1/messages"),  # one with it for a client that adds it
        ("/v1/chat/completions/chat/completions", "/v1/chat/completions"),  # a whole address
        ("/api/v1/completions", "/v1/completions"),
        ("/nothing", None),
    ],
)
def test_a_wrong_base_url_is_told_from_a_wrong_route(client: TestClient, path: str, meant: str | None) -> None:
    hint = "" if meant is None else f", but there is {meant}: check the client's base URL"
    assert error_of(client.post(path, json=CHAT))["message"] == f"there is no {path}{hint}"


def test_health_follows_the_engine(fake: FakeEngine, client: TestClient) -> None:
    def statuses() -> list[int]:
        found = [client.get(path).status_code for path in ("/health", "/health/live", "/health/ready")]
        assert [client.head(path).status_code for path in ("/health", "/health/live", "/health/ready")] == found  # as monitors ask
        return found

    assert statuses() == [200, 200, 200]
    fake.draining = True
    assert statuses() == [200, 200, 503]
    fake.draining, fake.last_step_age_s = False, 61.0
    assert statuses() == [503, 503, 503]
    fake.last_step_age_s, fake.healthy = 0.0, False
    assert statuses() == [503, 503, 503]


def test_tokenize_and_back(client: TestClient) -> None:
    answer = client.post("/tokenize", json={"prompt": "The quick €", "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["token_strs"][0] == "The" and any(text.startswith("bytes:\\x") for text in answer["token_strs"])
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "The quick €"}
    chat = client.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}).json()
    assert client.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"] == "<|user|>Hi<|end|><|assistant|>"


def test_a_short_list_of_tokens_waits_for_no_long_one(client: TestClient, fake: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    monkeypatch.setattr(fake.tokenizer, "decode", lambda *_, **__: threads.append(threading.current_thread().name))
    for count in (8_000, 8_001):
        client.post("/detokenize", json={"tokens": [9] * count})
    assert [name.startswith("foretoken-reader_") for name in threads] == [False, True]


@pytest.mark.parametrize("tokens", [[], [300], [-1], [2**70]])
def test_detokenize_refuses_ids_that_are_none(client: TestClient, tokens: list[int]) -> None:
    response = client.post("/detokenize", json={"tokens": tokens})
    assert response.status_code == 400 and error_of(response)["param"] == "tokens"


def test_cors_lets_local_pages_in_and_others_not(fake: FakeEngine, client: TestClient) -> None:
    def allowed(client: TestClient, origin: str) -> str | None:
        return client.get("/v1/models", headers={"Origin": origin}).headers.get("access-control-allow-origin")

    assert allowed(client, "http://localhost:3000") == "http://localhost:3000"
    assert allowed(client, "http://evil.example") is None
    configured = fake.client(allowed_origins=("https://app.example",), api_keys=("k",))
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    assert configured.options("/v1/chat/completions", headers=asked | {"Origin": "https://app.example"}).status_code == 200
    assert allowed(configured, "https://app.example") == "https://app.example"  # on a 401, so that a page can read it
    assert allowed(configured, "http://localhost:3000") is None


def test_ping_is_health_by_any_method(fake: FakeEngine, client: TestClient) -> None:
    for healthy, status in ((True, 200), (False, 503)):
        fake.healthy = healthy
        assert [client.request(method, "/ping").status_code for method in ("GET", "HEAD", "POST")] == [status] * 3


def test_load_counts_what_runs(fake: FakeEngine, client: TestClient) -> None:
    assert client.get("/load").json() == {"server_load": 0}
    fake.num_open = 3
    assert client.get("/load").json() == {"server_load": 3}
