"""Fields of other servers: what is ours under another name is read, and what would be lost in silence is refused."""

import json
from typing import Any

import pytest
from asking import CHAT
from fake_engine import FakeEngine
from starlette.testclient import TestClient

from foretoken.server.errors import ApiError
from foretoken.server.extras import ALIASES, settle_extras
from foretoken.server.schemas import ChatRequest, CompletionRequest, GenerationRequest

VALUES = {
    "n": 2, "max_tokens": 7, "max_completion_tokens": 8, "min_tokens": 3, "repetition_penalty": 1.5, "seed": 11,
    "include_stop_str_in_output": True, "truncate_prompt_tokens": 5, "thinking_token_budget": 9,
}
"""One that is not the default, of every field that has other names."""
OTHER_NAMES = [(name, alias) for name, aliases in ALIASES.items() for alias in aliases]


def chat(fields: dict[str, Any]) -> ChatRequest:
    return ChatRequest.model_validate_json(json.dumps(CHAT | fields))


@pytest.mark.parametrize(("name", "alias"), OTHER_NAMES)
def test_a_field_is_known_by_its_other_names(name: str, alias: str) -> None:
    body = chat({alias: VALUES[name]})
    assert body == chat({name: VALUES[name]}) and settle_extras(body) == 0
    if name in GenerationRequest.model_fields:
        assert getattr(CompletionRequest.model_validate({"prompt": "a", alias: VALUES[name]}), name) == VALUES[name]


@pytest.mark.parametrize(("name", "alias"), OTHER_NAMES)
def test_two_names_that_differ_are_refused(name: str, alias: str) -> None:
    with pytest.raises(ApiError, match=f"{alias} and {name} are names of one setting") as caught:
        settle_extras(chat({alias: not VALUES[name], name: VALUES[name]}))
    assert caught.value.param == alias
    for same in (VALUES[name], None):
        assert settle_extras(chat({alias: same, name: VALUES[name]})) == 0


@pytest.mark.parametrize("name", ["max_tokens", *ALIASES["max_tokens"]])
def test_minus_one_token_is_as_many_as_fit(name: str) -> None:
    assert chat({name: -1}).to_sampling_params().max_tokens is None
    assert CompletionRequest.model_validate({"prompt": "a", name: -1}).to_sampling_params().max_tokens is None
    assert chat({name: -1, "max_completion_tokens": 3}).to_sampling_params().max_tokens == 3


@pytest.mark.parametrize("name", ["max_completion_tokens", "max_output_tokens"])
def test_every_route_takes_the_limit_by_each_of_openais_names(client: TestClient, fake: FakeEngine, name: str) -> None:
    for route, body in (("chat/completions", CHAT), ("completions", {"prompt": "Hi"}), ("responses", {"input": "Hi"})):
        assert client.post(f"/v1/{route}", json=body | {name: 3}).status_code == 200
        error = client.post(f"/v1/{route}", json=body | {name: -2}).json()["error"]
        assert error["param"] == {"completions": "max_tokens", "responses": "max_output_tokens"}.get(route, "max_completion_tokens")
    assert [call.params.max_tokens for call in fake.calls] == [3, 3, 3]


def test_a_mistake_has_the_name_that_the_client_wrote(client: TestClient) -> None:
    error = client.post("/v1/completions", json={"prompt": "a", "n_predict": "many"}).json()["error"]
    assert error["param"] == "n_predict" and error["message"].startswith("n_predict:")


def test_the_responses_api_knows_them_too(client: TestClient, fake: FakeEngine) -> None:
    body = {"input": "Hi", "repeat_penalty": 1.5, "sampling_seed": 11}
    assert client.post("/v1/responses", json=body).status_code == 200
    assert (fake.calls[0].params.repetition_penalty, fake.calls[0].params.seed) == (1.5, 11)


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize(
    ("fields", "instead"),
    [
        ({"mirostat": 2, "mirostat_tau": 4.0}, "leave it out"),
        ({"typical_p": 0.7}, "leave it out"),
        ({"samplers": ["top_k", "temperature"]}, "leave it out"),
        ({"lora": [{"id": 0, "scale": 0.5}]}, "send the adapter's name as model"),
        ({"stop_regex": "x+"}, "send stop"),
        ({"n_probs": 5}, "send logprobs"),
        ({"functions": [{"name": "f"}]}, "send tools"),
        ({"do_sample": False}, "send temperature: 0"),
        ({"options": {"num_predict": 5}}, "send its entries beside the prompt"),
        ({"enable_thinking": False}, "chat_template_kwargs"),
    ],
)
def test_what_would_change_an_answer_is_refused(client: TestClient, route: str, fields: dict[str, Any], instead: str) -> None:
    body = {"input": "Hi"} if route == "/v1/responses" else {"prompt": "Hi"} if route == "/v1/completions" else CHAT | {"max_tokens": 5}
    response = client.post(route, json=body | fields)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith(next(iter(fields))) and instead in message


def test_defaults_written_out_and_what_does_nothing_alone_pass(client: TestClient, fake: FakeEngine) -> None:
    neutral = {"typical_p": 1, "mirostat": 0, "xtc_probability": 0.0, "dry_multiplier": 0, "top_n_sigma": -1.0, "repeat_last_n": 64}
    tuning = {"mirostat_tau": 5.0, "mirostat_eta": 0.1, "xtc_threshold": 0.1, "dry_base": 1.75, "dynatemp_exponent": 1.0}
    others = {"samplers": [], "n_probs": 0, "stop_regex": None, "lora_path": None, "do_sample": True, "options": {}, "format": ""}
    assert client.post("/v1/chat/completions", json=CHAT | neutral | tuning | others).status_code == 200
    assert fake.calls[0].params == chat({}).to_sampling_params()


def test_inside_of_a_body_names_may_mean_anything() -> None:
    assert settle_extras(chat({"messages": [{"role": "user", "content": "Hi", "options": {"a": 1}, "lora": "b"}]})) == 2


def test_messages_may_ask_for_a_form_in_other_words(client: TestClient, fake: FakeEngine) -> None:
    body = CHAT | {"max_tokens": 5, "structured_outputs": {"regex": "a+"}}
    assert client.post("/v1/messages", json=body).status_code == 200
    grammar = fake.calls[0].params.grammar
    assert grammar is not None and (grammar.kind, grammar.text) == ("regex", "a+")
