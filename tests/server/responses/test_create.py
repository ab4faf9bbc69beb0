"""POST /v1/responses in one piece: what the model is asked, what a client gets, what is refused and under which name."""

from collections.abc import Callable
from typing import Any

import pytest
from fake_engine import FakeEngine
from openai.types.responses import Response
from responses_api import create, function, refusal
from starlette.testclient import TestClient

CALLS = 'Wait.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n<tool_call>\n{"name": "time"}\n</tool_call>'


def test_a_plain_answer(api: TestClient, fake: FakeEngine) -> None:
    told = create(api, metadata={"a": "b"}, user="u", temperature=0.5, seed=3, max_output_tokens=40, prompt_cache_key="k")
    response = Response.model_validate(told)
    assert response.output_text == fake.reply and response.status == "completed" and response.object == "response"
    (message,) = told["output"]
    assert message["type"] == "message" and message["status"] == "completed" and message["id"].startswith("msg_")
    assert told["id"].startswith("resp_") and told["store"] and not told["background"] and told["completed_at"] >= told["created_at"]
    assert (told["metadata"], told["user"], told["temperature"], told["prompt_cache_key"]) == ({"a": "b"}, "u", 0.5, "k")
    params = fake.calls[0].params
    assert (params.temperature, params.seed, params.max_tokens) == (0.5, 3, 40)
    usage = told["usage"]
    assert usage["output_tokens"] == len(fake.tokenizer.encode(fake.reply)) and usage["input_tokens"] == len(fake.calls[0].prompt)
    assert usage["input_tokens_details"]["cached_tokens"] == 3 and usage["output_tokens_details"]["reasoning_tokens"] == 0
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert told["metrics"]["speculative_decoding"]["num_spec_tokens"] == 5


def test_an_empty_answer_is_a_message(api: TestClient, fake: FakeEngine) -> None:
    fake.reply = "\n"
    assert [item["type"] for item in create(api)["output"]] == ["message"]


def test_the_items_become_one_conversation(api: TestClient, fake: FakeEngine) -> None:
    items = [
        {"role": "developer", "content": "D"},
        {"role": "user", "content": [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "so", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call", "call_id": "c2", "name": "time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c2", "output": "noon"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "sun"}]},
        {"type": "message", "role": "user", "content": "ok"},
    ]
    create(api, items, instructions="I")
    assert fake.prompt() == (
        '<|system|>I<|end|><|system|>D<|end|><|user|>one\ntwo<|end|><|assistant|>~hm~soweather({"city": "Rome"})time({})<|end|>'
        "<|tool|>noon=c2<|end|><|tool|>sun=c1<|end|><|user|>ok<|end|><|assistant|><think></think>"
    )


def test_tools_and_their_choice(api: TestClient, fake: FakeEngine) -> None:
    fake.reply = CALLS
    told = create(api, tools=[function("weather", description="Of a city", strict=True), function("time")], tool_choice="auto")
    message, first, second = told["output"]
    assert message["content"][0]["text"] == "Wait."
    assert (first["type"], first["name"], first["arguments"]) == ("function_call", "weather", '{"city": "Rome"}')
    assert first["status"] == "completed" and first["id"].startswith("fc_")
    assert (second["name"], second["arguments"]) == ("time", "{}") and first["call_id"] != second["call_id"]
    assert told["tools"][0]["strict"] is True and told["tool_choice"] == "auto"
    assert '"name": "weather"' in fake.prompt() and '"function": {' in fake.prompt()
    named: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]}
    assert create(api, tools=[function("weather"), function("time")], tool_choice=named)["tool_choice"] == named
    assert "weather" not in fake.prompt()
    create(api, tools=[function("weather"), function("time")], tool_choice={"type": "function", "name": "time"}, parallel_tool_calls=False)
    assert "weather" not in fake.prompt() and fake.calls[-1].params.grammar is not None


def test_functions_in_a_namespace(api: TestClient, fake: FakeEngine) -> None:
    """As Codex offers those of MCP servers: the model calls crm.find, the client gets find of crm."""
    crm = {"type": "namespace", "name": "crm", "description": "Customers", "tools": [function("find", description="One"), function("add")]}
    tools: list[dict[str, Any]] = [function("find"), crm]
    fake.reply = '<tool_call>\n{"name": "crm.find"}\n</tool_call>\n<tool_call>\n{"name": "find"}\n</tool_call>'
    told = create(api, tools=tools)
    first, second = told["output"]
    assert (first["namespace"], first["name"], second["name"]) == ("crm", "find", "find") and "namespace" not in second
    assert Response.model_validate(told) and told["tools"] == tools
    assert '"name": "crm.add"' in fake.prompt() and fake.prompt().count("Customers") == 1 and "Customers\\n\\nOne" in fake.prompt()
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "x"} for call in told["output"]]
    create(api, results, previous_response_id=told["id"], tools=tools)
    assert "crm.find({})find({})" in fake.prompt()
    create(api, [{"role": "user", "content": "Hi"}, *told["output"], *results], tools=tools)
    assert fake.calls[-1].prompt == fake.calls[-2].prompt
    create(api, tools=tools, tool_choice={"type": "function", "name": "crm.add"})
    assert fake.calls[-1].params.grammar is not None and "crm.add" in fake.prompt() and "crm.find" not in fake.prompt()


def test_reasoning_comes_as_an_item_of_its_own(api: TestClient, fake: FakeEngine) -> None:
    fake.reply = "I think.\n</think>\n\nYes"
    kwargs = {"chat_template_kwargs": {"enable_thinking": True}, "reasoning": {"effort": "low", "summary": "auto"}}
    told = create(api, include=["reasoning.encrypted_content"], **kwargs)
    thought, message = told["output"]
    assert thought["type"] == "reasoning" and thought["content"] == [{"type": "reasoning_text", "text": "I think."}]
    assert thought["summary"] == [] and message["content"][0]["text"] == "Yes" and told["reasoning"]["effort"] == "low"
    assert 0 < told["usage"]["output_tokens_details"]["reasoning_tokens"] < told["usage"]["output_tokens"]
    assert [item["type"] for item in create(api, include_reasoning=False, **kwargs)["output"]] == ["message"]
    create(api, thinking_token_budget=7, **kwargs)
    assert fake.calls[-2].params.thinking is None and fake.calls[-1].params.thinking is not None


@pytest.mark.parametrize("asked", [{"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}])
def test_logprobs(api: TestClient, fake: FakeEngine, asked: dict[str, Any]) -> None:
    logprobs = create(api, **asked)["output"][0]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in logprobs) == fake.reply
    assert all(len(entry["top_logprobs"]) == asked.get("top_logprobs", 0) for entry in logprobs)
    assert create(api)["output"][0]["content"][0]["logprobs"] == []


def test_the_form_of_the_answer(api: TestClient, fake: FakeEngine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    format = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    assert create(api, text={"format": format, "verbosity": "low"})["text"] == {"format": format, "verbosity": "low"}
    grammar = fake.calls[-1].params.grammar
    assert grammar is not None and "properties" in grammar.text
    create(api, text={"format": {"type": "text"}})
    assert fake.calls[-1].params.grammar is None


def test_our_own_fields_reach_the_engine(api: TestClient, fake: FakeEngine) -> None:
    predicted = {"type": "content", "content": "a"}
    create(api, speculation={"method": "off"}, top_k=7, stop=["x"], cache_salt="s", priority=2, prediction=predicted)
    call = fake.calls[-1]
    assert call.params.speculation_settings.method == "off" and call.params.top_k == 7 and call.params.stop == ["x"]
    assert call.priority == 2 and call.params.prediction


def test_a_conversation_goes_on(api: TestClient, fake: FakeEngine) -> None:
    first = create(api, "one", instructions="I")
    second = create(api, "two", previous_response_id=first["id"])
    create(api, [{"role": "user", "content": "three"}], previous_response_id=second["id"], instructions="J")
    said = f"{fake.reply}<|end|>"
    assert fake.prompt() == (
        f"<|system|>J<|end|><|user|>one<|end|><|assistant|>{said}<|user|>two<|end|><|assistant|>{said}"
        "<|user|>three<|end|><|assistant|><think></think>"
    )
    create(api, "two", previous_response_id=first["id"])  # from the first one another way
    assert fake.prompt().count("<|user|>") == 2 and "<|system|>" not in fake.prompt()
    assert api.post("/v1/responses", json={"previous_response_id": second["id"]}).is_success and fake.prompt().count("<|user|>") == 2
    assert api.post("/v1/responses", json={"instructions": "I"}).json()["error"]["param"] == "input"


def test_a_call_is_answered_in_the_next_request(api: TestClient, fake: FakeEngine) -> None:
    fake.reply = CALLS.partition("\n")[2]
    tools = [function("weather"), function("time")]
    first = create(api, tools=tools)
    outputs = [{"type": "function_call_output", "call_id": call["call_id"], "output": "x"} for call in first["output"]]
    create(api, outputs, previous_response_id=first["id"], tools=tools)
    assert fake.prompt().endswith(f"<|tool|>x={first['output'][1]['call_id']}<|end|><|assistant|><think></think>")
    again = [{"role": "user", "content": "Hi"}, *first["output"], *outputs]  # by hand, as clients do that store nothing
    create(api, again, tools=tools)
    assert fake.calls[-1].prompt == fake.calls[-2].prompt


def test_items_of_earlier_responses_can_be_named(api: TestClient, fake: FakeEngine) -> None:
    fake.reply = CALLS
    tools = [function("weather"), function("time")]
    output = create(api, "one", tools=tools)["output"]
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "x"} for call in output[1:]]
    named = [{"role": "user", "content": "one"}, *[{"type": "item_reference", "id": item["id"]} for item in output], *results]
    told = create(api, named, tools=tools)
    written = [{"role": "user", "content": "one"}, *output, *results]
    create(api, written, tools=tools)
    assert fake.calls[-1].prompt == fake.calls[-2].prompt
    listed = api.get(f"/v1/responses/{told['id']}/input_items", params={"order": "asc"}).json()["data"]
    assert [item["type"] for item in listed] == ["message", "message"] + ["function_call"] * 2 + ["function_call_output"] * 2
    assert listed[1]["id"] == output[0]["id"]


@pytest.mark.parametrize(("room", "limit"), [(512, "max_output_tokens"), (300, "max_output_tokens"), (300, "max_tokens")])
def test_truncation_leaves_out_the_oldest_turns(serve: Callable[..., TestClient], fake: FakeEngine, room: int, limit: str) -> None:
    """As many as must go for the context, or for a cache that holds less."""
    fake.cache_tokens = room
    api = serve()
    turns = [{"role": role, "content": f"{number}" * 60} for number in range(9) for role in ("user", "assistant")]
    items = [{"role": "system", "content": "S"}, *turns, {"role": "user", "content": "last"}]
    assert refusal(api, items)["code"] == "context_length_exceeded"
    create(api, items, truncation="auto", **{limit: 100})
    said = fake.prompt()
    assert said.startswith("<|system|>S<|end|><|user|>") and said.endswith("<|user|>last<|end|><|assistant|><think></think>")
    kept = len(fake.calls[-1].prompt)
    assert kept <= room - 100 < kept + len(fake.tokenizer.encode("8" * 120)) + 40
    assert refusal(api, [{"role": "user", "content": "x" * 5000}], truncation="auto")["param"] == "input"


def test_the_prompts_tokens_are_counted(api: TestClient, fake: FakeEngine) -> None:
    counted = api.post("/v1/responses/input_tokens", json={"input": "Hi", "instructions": "I"}).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": create(api, instructions="I")["usage"]["input_tokens"]}
    assert len(fake.calls) == 1


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"input": []}, "input", "a string or a list"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "'msg_1' not found"),
        ({"input": [{"type": "computer_call"}]}, "input", "computer_call"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input", "input_image"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input", "'c'"),
        ({"input": [{"role": "user"}]}, "input.0.message.content", "required"),
        ({"input": [7]}, "input", "object"),
        ({"input": [{"role": "user", "content": "x"}] * 5000}, "input", "4096"),
        ({"tools": [{"type": "web_search"}]}, "tools", "'web_search' is not available"),
        ({"tools": [{"type": "function"}]}, "tools.0.name", "required"),
        ({"input": [{"type": "function_call", "call_id": "c", "arguments": "", "name": "f" * 6, "namespace": "n" * 250}]},
         "input.0.function_call", "256 characters together"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools", "a list of tools"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]}, "tools", "'custom' is not available"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "namespace"}]}]}, "tools", "not namespaces"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]}, "tools.0.name", "required"),
        ({"tools": [function("f")], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "g"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "tool_choice must be"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens", "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs", "20"),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"n": 2}, "n", "one choice"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "minimal"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "json_schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name", "name"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "no"}}}}, "text.format.schema", "schema"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata", "16"),
        ({"metadata": {"a": 1}}, "metadata.a", "string"),
        ({"include": ["nothing"]}, "include.0", "message.output_text.logprobs"),
        ({"conversation": "conv_1"}, "conversation", "not supported"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "not supported"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not found"),
        ({"background": True, "store": False}, "background", "stored"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "stream: true"),
        ({"truncation": "middle"}, "truncation", "auto"),
        ({"instructions": ["x"]}, "instructions", "string"),
    ],
)
def test_refusals_name_the_field(api: TestClient, fake: FakeEngine, fields: dict[str, Any], param: str, said: str) -> None:
    error = refusal(api, **fields) if "input" not in fields else refusal(api, fields["input"])
    assert error["param"] == param and said in error["message"], error
    assert not fake.calls and fake.num_open == 0


@pytest.mark.parametrize(
    "raw",
    [
        b'{"input": "x", "tools": [{"type": "function", "name": "f", "x": NaN}]}',
        b'{"input": "x", "text": {"format": {"type": "text", "x": 1e999}}}',
        b'{"input": "\\ud800"}',
        b'{"input": 1e999}',
        b'{"input": "x", "tools": ' + b"[" * 5000,
    ],
)
def test_odd_json_is_no_500(api: TestClient, raw: bytes) -> None:
    assert api.post("/v1/responses", content=raw, headers={"content-type": "application/json"}).status_code == 400


def test_a_failure_is_an_http_error_and_nothing_is_kept(api: TestClient, fake: FakeEngine) -> None:
    fake.fails_after = 2
    response = api.post("/v1/responses", json={"input": "Hi"})
    assert response.status_code == 500 and response.json()["error"]["code"] == "numerical_error" and fake.num_open == 0
    assert api.get(f"/v1/responses/{fake.calls[0].id}").status_code == 404


def test_without_a_store(serve: Callable[..., TestClient], fake: FakeEngine) -> None:
    api = serve(response_store="none")
    told = create(api)
    assert told["store"] is False and api.get(f"/v1/responses/{told['id']}").status_code == 404
    for fields in ({"store": True}, {"background": True}, {"previous_response_id": "resp_1"}):
        assert "stores no responses" in refusal(api, **fields)["message"]


def test_what_is_not_to_be_stored_is_not(api: TestClient) -> None:
    told = create(api, store=False)
    assert told["store"] is False and api.get(f"/v1/responses/{told['id']}").status_code == 404
