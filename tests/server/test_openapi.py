"""The OpenAPI document against the app: its routes, what they answer, what they take."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from asking import CHAT
from fake_engine import FakeEngine
from jsonschema import Draft202012Validator
from starlette.routing import Route
from starlette.testclient import TestClient

from foretoken.engine.errors import InvalidRequest
from foretoken.engine.request import SamplingParams
from foretoken.server.openapi import OPERATIONS
from foretoken.server.openapi_answers import ANSWERS
from foretoken.server.openapi_requests import LIMITS, request_schemas
from foretoken.server.page import PAGE_FILES

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SPEAKS = {"stream": True, "stream_options": {"include_usage": True, "include_speculation": True, "continuous_usage_stats": True}}
TOKENS = {"return_token_ids": True}


@pytest.fixture
def described(client: TestClient) -> dict[str, Any]:
    return client.get("/openapi.json").json()


def refs(schema: Any) -> Iterator[str]:
    match schema:
        case {"$ref": str(name)}:
            yield name
        case dict():
            for inner in schema.values():
                yield from refs(inner)
        case list():
            for inner in schema:
                yield from refs(inner)


def closed(schema: Any) -> Any:
    """The same where objects have no other keys than those described."""
    match schema:
        case {"properties": properties}:
            inner = {key: closed(value) for key, value in schema.items()}
            return {"additionalProperties": False} | inner | {"properties": closed(properties)}
        case dict():
            return {key: closed(value) for key, value in schema.items()}
        case list():
            return [closed(value) for value in schema]
        case _:
            return schema


def check(described: dict[str, Any], name: str, value: Any) -> None:
    schemas = closed(described["components"]["schemas"])
    Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}}).validate(value)


def test_it_lists_the_routes_that_there_are(fake: FakeEngine, described: dict[str, Any]) -> None:
    app = fake.app()
    there = {
        (route.path.replace(":path}", "}"), method.lower())
        for route in app.routes
        if isinstance(route, Route) and route.path not in PAGE_FILES
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert {(path, method) for path, methods in described["paths"].items() for method in methods} == there


def test_its_schemas_are_valid_and_all_there(described: dict[str, Any]) -> None:
    schemas = described["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    assert {name.removeprefix("#/components/schemas/") for name in refs(described)} <= schemas.keys()
    ids = [operation["operationId"] for methods in described["paths"].values() for operation in methods.values()]
    assert len(set(ids)) == len(ids)
    links = [link["operationId"] for methods in described["paths"].values() for operation in methods.values()
             for answer in operation["responses"].values() for link in answer.get("links", {}).values()]
    assert links and set(links) <= set(ids)


def test_no_request_model_hides_an_answer() -> None:
    _, schemas = request_schemas([operation.body for operation in OPERATIONS if operation.body is not None], ["m"])
    assert "ChatRequest" in schemas and schemas.keys().isdisjoint(ANSWERS)


@pytest.mark.parametrize(
    "path, body, answer",
    [
        ("/v1/chat/completions", CHAT, "ChatCompletion"),
        ("/v1/chat/completions", CHAT | TOKENS | {"n": 2, "logprobs": True, "top_logprobs": 2}, "ChatCompletion"),
        ("/v1/completions", {"prompt": "Hi"}, "Completion"),
        ("/v1/completions", {"prompt": ["Hi", "Ho"], "n": 2, "logprobs": 2} | TOKENS, "Completion"),
        ("/v1/fim/completions", {"prompt": "Hi"}, "ChatCompletion"),
        ("/v1/responses", {"input": "Hi"}, None),
        ("/v1/messages", CHAT | {"max_tokens": 8}, None),
        ("/v1/messages/count_tokens", CHAT, "InputTokens"),
        ("/v1/responses/input_tokens", {"input": "Hi"}, "InputTokens"),
        ("/tokenize", {"prompt": "Hi"}, "Tokens"),
        ("/tokenize", CHAT | {"return_token_strs": True}, "Tokens"),
        ("/detokenize", {"tokens": [1, 2]}, "Detokenized"),
        ("/ping", {}, "Health"),
    ],
)
def test_answers_are_as_described(client: TestClient, described: dict[str, Any], path: str, body: Any, answer: str | None) -> None:
    """Without a name: objects whose keys are not all described."""
    said = client.post(path, json=body)
    assert said.status_code == 200, said.text
    content = described["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    Draft202012Validator(content | {"components": described["components"]}).validate(said.json())
    if answer is not None:
        assert content == {"$ref": f"#/components/schemas/{answer}"}
        check(described, answer, said.json())


@pytest.mark.parametrize(
    "path", ["/v1/models", "/tokenizer_info", "/health", "/health/live", "/health/ready", "/ping", "/load", "/version", "/v1/models/{name}"]
)
def test_what_is_fetched_is_as_described(client: TestClient, described: dict[str, Any], path: str) -> None:
    name = client.get("/v1/models").json()["data"][0]["id"]
    content = described["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    Draft202012Validator(content | {"components": described["components"]}).validate(client.get(path.format(name=name)).json())


@pytest.mark.parametrize(
    "path, body, chunk",
    [
        ("/v1/chat/completions", CHAT | SPEAKS | TOKENS | {"logprobs": True, "top_logprobs": 1}, "ChatCompletionChunk"),
        ("/v1/chat/completions", CHAT | {"stream": True}, "ChatCompletionChunk"),
        ("/v1/completions", {"prompt": ["a", "b"], "logprobs": 1} | SPEAKS | TOKENS, "Completion"),
        ("/v1/completions", {"prompt": "a", "stream": True}, "Completion"),
    ],
)
def test_chunks_are_as_described(client: TestClient, described: dict[str, Any], path: str, body: Any, chunk: str) -> None:
    lines = [line.removeprefix("data: ") for line in client.post(path, json=body).text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]" and lines
    for line in lines:
        check(described, chunk, json.loads(line))


@pytest.mark.parametrize(
    "path, body, status",
    [
        ("/v1/chat/completions", {"messages": []}, 400),
        ("/v1/completions", {"prompt": "a", "model": "no"}, 404),
        ("/v1/messages", CHAT, 400),
        ("/v1/responses", {"input": "a", "previous_response_id": "resp_no"}, 400),
    ],
)
def test_errors_are_as_described(client: TestClient, described: dict[str, Any], path: str, body: Any, status: int) -> None:
    refused = client.post(path, json=body)
    assert refused.status_code == status
    name = described["paths"][path]["post"]["responses"][str(status)]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    check(described, name, refused.json())


def params(name: str, value: Any) -> SamplingParams:
    fields: dict[str, Any] = {"max_tokens": None, name: value}
    return SamplingParams(**fields)


@pytest.mark.parametrize("name", sorted(LIMITS.keys() - {"n", "prompt_logprobs", "stop", "logit_bias", "bad_words", "top_logprobs"}))
def test_the_ranges_are_the_engines(name: str) -> None:
    limits = LIMITS[name]
    step = 1 if isinstance(limits["maximum"], int) and isinstance(limits.get("minimum"), int) and limits["maximum"] > 2 else 0.001
    allowed = [limits["maximum"], limits.get("minimum", step)]
    for value in allowed:
        params(name, value)
    for value in (limits["maximum"] + step, limits.get("minimum", step) - step):
        with pytest.raises(InvalidRequest):
            params(name, value)


def test_the_lengths_are_the_engines() -> None:
    stop, bias = LIMITS["stop"], LIMITS["logit_bias"]["maxProperties"]
    SamplingParams(stop=["a" * stop["maxLength"]] * stop["maxItems"], logit_bias=dict.fromkeys(range(bias), 1.0))
    for wrong in (("stop", ["a"] * (stop["maxItems"] + 1)), ("stop", "a" * (stop["maxLength"] + 1)), ("stop", "")):
        with pytest.raises(InvalidRequest):
            params(*wrong)
    with pytest.raises(InvalidRequest):
        SamplingParams(logit_bias=dict.fromkeys(range(bias + 1), 1.0))


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "stop": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "content": None}], "stop": ["a"]}),
        ("/v1/chat/completions", CHAT | {"response_format": {"type": "text"}, "structured_outputs": {"regex": False}}),
        ("/v1/completions", {"prompt": [1, 2], "stop": None}),
        ("/v1/completions", {"prompt": [[1, 2], [3]]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}], "tools": None}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "system": "b"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "max_tokens": 4, "system": None}),
    ],
)
def test_shorthands_are_described_and_taken(client: TestClient, described: dict[str, Any], path: str, body: Any) -> None:
    schema = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    Draft202012Validator(schema | {"components": described["components"]}).validate(body)
    assert client.post(path, json=body).status_code == 200


def test_a_server_with_keys_says_so(fake: FakeEngine) -> None:
    client = fake.client(api_keys=("k",))
    assert client.get("/openapi.json").status_code == 401
    described = client.get("/openapi.json", headers={"Authorization": "Bearer k"}).json()
    assert described["paths"]["/v1/models"]["get"]["security"] == [{"key": []}] and described["paths"]["/health"]["get"]["security"] == []
    assert "401" in described["paths"]["/v1/models"]["get"]["responses"]


@pytest.mark.parametrize("path, methods", [("/ping", "GET, HEAD, POST"), ("/v1/responses/x", "DELETE, GET"), ("/v1/completions", "POST")])
def test_a_refused_method_is_told_which_there_are(client: TestClient, path: str, methods: str) -> None:
    refused = client.put(path)
    assert refused.status_code == 405 and refused.headers["allow"] == methods
