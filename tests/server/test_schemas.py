import json
from typing import Any

import pytest
from asking import CHAT, refusal
from fake_engine import FakeEngine
from starlette.testclient import TestClient

from foretoken.server.extras import settle_extras
from foretoken.server.schemas import ChatRequest, CompletionRequest

JSON = {"Content-Type": "application/json"}


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate_json(json.dumps(CHAT | fields))


def test_fields_become_sampling_params() -> None:
    body = chat(
        n=2,
        temperature=0,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        presence_penalty=-0.1,
        logit_bias={"7": -100, "8": 5},
        bad_words=["no"],
        allowed_token_ids=[7, 8],
        max_tokens=9,
        max_completion_tokens=10,
        min_tokens=1,
        ignore_eos=True,
        stop="END",
        stop_token_ids=[5],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        seed=3,
        logprobs=True,
        top_logprobs=4,
        prediction={"type": "content", "content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]},
        speculation={"method": "ngram", "num_speculative_tokens": 3},
    )
    params = body.to_sampling_params()
    assert (params.n, params.temperature, params.top_k, params.max_tokens, params.logprobs) == (2, 0, 40, 10, 4)
    assert params.logit_bias == {7: -100, 8: 5} and tuple(params.stop) == ("END",) and params.prediction == "abc"
    assert params.speculation_settings.method == "ngram" and params.speculation_settings.num_speculative_tokens == 3
    assert params.skip_special_tokens is False and params.ignore_eos and params.seed == 3


def test_null_and_missing_fields_have_the_defaults() -> None:
    nulls = {name: None for name in ChatRequest.model_fields if name != "messages"}
    assert chat(**nulls).to_sampling_params() == chat().to_sampling_params()
    assert chat().to_sampling_params().max_tokens is None
    assert CompletionRequest.model_validate({"prompt": "a"}).to_sampling_params().max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_the_four_kinds_of_prompt(prompt: Any, prompts: Any) -> None:
    assert CompletionRequest.model_validate_json(json.dumps({"prompt": prompt})).prompt == prompts


@pytest.mark.parametrize("prompt", [None, [], {}, 1, [1, "a"], [["a"]], [1.0], [True], [[1], "a"], [[[1]]]])
def test_other_prompts_are_refused(client: TestClient, prompt: Any) -> None:
    assert refusal(client, "/v1/completions", {"prompt": prompt})["param"] == "prompt"


HUGE = 2**63
BAD_VALUES: list[tuple[str, Any]] = [
    *[(name, value) for name in ("temperature", "top_p", "min_p") for value in (-1, "0.5", True, 1e308, [], {})],
    ("temperature", -0.1),
    ("top_p", 0),
    ("top_p", 1.1),
    *[("top_k", value) for value in (-2, 1.5, 2**31, "1")],
    *[("n", value) for value in (0, -1, 129, HUGE, 1.5, True, "1")],
    *[("max_tokens", value) for value in (0, -2, HUGE, 1.5, True, "1")],
    *[("min_tokens", value) for value in (-1, HUGE)],
    *[("prompt_logprobs", value) for value in (-1, 21)],
    ("repetition_penalty", 0),
    *[(name, value) for name in ("frequency_penalty", "presence_penalty") for value in (-2.1, 2.1)],
    *[("seed", value) for value in (HUGE, -HUGE - 1, 0.5, "a")],
    *[("stop", value) for value in (1, [1], [""], "", ["a"] * 17, "x" * 257, {})],
    ("stop_token_ids", ["a"]),
    ("stop_token_ids", [1] * 1025),
    *[("logit_bias", value) for value in ({"": 1}, {"a": 1}, {"-1": 1}, {"1": 101}, {"1": None}, {"1" * 5000: 1}, [], {"²": 1})],
    ("allowed_token_ids", []),
    ("bad_words", "a"),
    ("ignore_eos", 1),
    ("cache_salt", ""),
    ("cache_salt", "x" * 1025),
    ("priority", 2**31),
    ("priority", "1"),
    ("prediction", "text"),
    ("prediction", {"type": "content"}),
    ("speculation", {"method": "auto", "k": 3}),
    ("speculation", {"method": "medusa"}),
    ("speculation", {"num_speculative_tokens": -1}),
    ("speculation", {"num_speculative_tokens": 65}),
    ("speculation", "off"),
    ("stream", 1),
    ("model", 1),
    ("stream_options", {"include_usage": True}),  # without stream
    *[(name, 10**400) for name in ("n", "top_k", "max_tokens", "min_tokens", "seed", "priority")],  # too large even for a float
]


@pytest.mark.parametrize(("name", "value"), [case for case in BAD_VALUES if case != ("prediction", {"type": "content"})])
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_bad_values_are_a_400_that_names_the_field(client: TestClient, fake: FakeEngine, route: str, name: str, value: Any) -> None:
    base = CHAT if "chat" in route else {"prompt": "a"}
    error = refusal(client, route, base | {name: value})
    param = error["param"].removeprefix("max_completion_")
    assert param == name or param.startswith(name + "."), error
    assert not fake.calls


@pytest.mark.parametrize(("name", "value"), [("prompt", []), ("prompt", ["a", 1]), ("stop", 5)])
def test_a_message_names_the_field_once(client: TestClient, name: str, value: Any) -> None:
    assert refusal(client, "/v1/completions", {"prompt": "a"} | {name: value})["message"].startswith(f"{name}: m")


def test_an_unknown_key_of_our_own_is_told_with_those_there_are(client: TestClient) -> None:
    error = refusal(client, "/v1/completions", {"prompt": "a", "speculation": {"method": "off", "k": 3}})
    assert error["message"] == "speculation: there is no key 'k'; known are method, num_speculative_tokens, corpus_id"
    assert error["param"] == "speculation"


def test_no_top_logprobs_need_no_logprobs(client: TestClient) -> None:
    """Clients that write out every default send both."""
    assert client.post("/v1/chat/completions", json=CHAT | {"logprobs": False, "top_logprobs": 0}).status_code == 200


@pytest.mark.parametrize("value", [-1, 21])
def test_top_logprobs_out_of_range_are_told_under_their_own_name(client: TestClient, value: int) -> None:
    error = refusal(client, "/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": value})
    assert error["param"] == "top_logprobs" and f"from 0 to 20, not {value}" in error["message"]


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(client: TestClient, literal: str) -> None:
    response = client.post("/v1/completions", content=f'{{"prompt":"a","temperature":{literal}}}', headers=JSON)
    assert response.status_code == 400 and response.json()["error"]["param"] == "temperature"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"a"',
        b"1",
        b'{"prompt":"\\ud800"}',
        b'{"prompt":"\\udc00 tail"}',
        b'{"prompt":"\xff"}',
        b'{"prompt":' + b"[" * 100_000,
        b'{"x":' + b"[" * 500 + b"]" * 500 + b',"prompt":"a"}',
        b'{"prompt":"a","seed":1' + b"0" * 5000 + b"}",
    ],
)
def test_what_is_no_json_object_is_invalid_json(client: TestClient, body: bytes) -> None:
    response = client.post("/v1/completions", content=body, headers=JSON)
    assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_json", response.text


@pytest.mark.parametrize("text", [r"\ud83d", r"\ud83d!", r"\ude00", r"\ud83d\ud83d"])
def test_half_of_a_character_is_told_as_such(client: TestClient, text: str) -> None:
    response = client.post("/v1/completions", content=f'{{"prompt":"{text}"}}', headers=JSON)
    assert "cut in the middle of a character" in response.json()["error"]["message"]


def test_a_byte_order_mark_is_no_mistake(client: TestClient) -> None:
    assert client.post("/v1/completions", content='\ufeff{"prompt":"a"}'.encode(), headers=JSON).status_code == 200


@pytest.mark.parametrize("headers", [{}, {"Content-Type": "text/plain"}, JSON | {"Content-Encoding": "gzip"}])
def test_other_media_types_are_a_415(client: TestClient, headers: dict[str, str]) -> None:
    response = client.post("/v1/completions", content=b'{"prompt":"a"}', headers=headers)
    assert response.status_code == 415 and response.json()["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"functions": [{"name": "f"}]},
        {"modalities": ["text", "audio"]},
        {"audio": {"voice": "alloy"}},
        {"use_beam_search": True},
        {"best_of": 2},
        {"web_search_options": {}},
        {"chat_template": "{{ messages }}"},
        {"echo": True},
    ],
)
def test_known_but_unsupported_parameters_are_named(client: TestClient, fields: dict[str, Any]) -> None:
    error = refusal(client, "/v1/chat/completions", CHAT | fields)
    assert (error["param"], error["code"]) == (next(iter(fields)), "unsupported_parameter")


@pytest.mark.parametrize(("name", "value"), [("best_of", 2), ("prompt_embeds", "x")])
def test_unsupported_completion_parameters_are_named(client: TestClient, name: str, value: Any) -> None:
    assert refusal(client, "/v1/completions", {"prompt": "a", name: value})["param"] == name


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_media_is_refused(client: TestClient, kind: str) -> None:
    content = [{"type": "text", "text": "what is this?"}, {"type": kind, kind: {"url": "http://169.254.169.254/"}}]
    assert refusal(client, "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})["code"] == "unsupported_content"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "Hi",
        [1],
        [{"content": "Hi"}],
        [{"role": "tool", "content": "Hi"}],
        [{"role": "user"}],
        [{"role": "system", "content": None}, {"role": "user", "content": "Hi"}],
        [{"role": "user", "content": "Hi"}, {"role": "tool", "tool_call_id": "1", "content": None}],
        [{"role": "user", "content": 1}],
        [{"role": "user", "content": [{"text": "Hi"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 1}]}],
        [{"role": "assistant", "content": None, "tool_calls": [{}]}],
        [{"role": "user", "content": "Hi"}] * 4097,
    ],
)
def test_other_messages_are_refused(client: TestClient, messages: Any) -> None:
    error = refusal(client, "/v1/chat/completions", {"messages": messages})
    assert error["param"].startswith(("messages", "tool_calls"))


def test_harmless_values_of_unsupported_parameters_pass() -> None:
    body = chat(
        tools=[], tool_choice="auto", response_format={"type": "text"}, modalities=["text"], use_beam_search=False, user="u", store=False
    )
    assert settle_extras(body) == 0


def test_unknown_fields_are_counted_at_every_depth(client: TestClient) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi", "colour": 1}],
        "stream": True,
        "stream_options": {"include_obfuscation": True, "new": 1},
        "brand_new": {"a": 1},
        "user": "u",
    }
    assert settle_extras(ChatRequest.model_validate(body)) == 3
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert "foretoken:unknown_request_fields_total 3.0" in client.get("/metrics").text
