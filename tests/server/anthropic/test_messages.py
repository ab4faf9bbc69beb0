"""POST /v1/messages through the app: answers and events in Anthropic's shapes, and what is asked of the engine."""

import json
from typing import Any

import pytest
from asking import answer, named_events
from fake_engine import FakeEngine
from hermes import CALLS, THINKING
from starlette.testclient import TestClient

ROUTE = "/v1/messages"
ASK = {"model": "tiny", "max_tokens": 40, "messages": [{"role": "user", "content": "Hi"}]}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"name": "weather", "description": "Of a city", "input_schema": CITY}, {"name": "time", "input_schema": {"type": "object"}}]


@pytest.fixture
def hermes(fake: FakeEngine) -> TestClient:
    fake.tokenizer.chat_template = THINKING
    return fake.client()


def whole(client: TestClient, **fields: Any) -> dict[str, Any]:
    return answer(client, ROUTE, ASK | fields)


def streamed(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    return named_events(client, ROUTE, ASK | fields)


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks of a stream, as a client puts them together; their events must be in order."""
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events:
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert not is_open and index == len(blocks)
                blocks.append(block | {"input": ""} if block["type"] == "tool_use" else block)
                is_open = True
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                assert is_open and index == len(blocks) - 1
                kind, key = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}.get(
                    blocks[-1]["type"], ("input_json_delta", "partial_json")
                )
                assert delta["type"] == kind
                blocks[-1]["input" if kind == "input_json_delta" else key] += delta[key]
            case {"type": "content_block_stop", "index": index}:
                assert is_open and index == len(blocks) - 1
                is_open = False
            case _:
                pass
    assert not is_open
    return [block | {"input": json.loads(block["input"] or "{}")} if block["type"] == "tool_use" else block for block in blocks]


def without_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in block.items() if key != "id"} for block in blocks]


def test_a_whole_answer(client: TestClient, fake: FakeEngine) -> None:
    body = whole(client)
    assert body.pop("id").startswith("msg_") and body.pop("metrics")["speculative_decoding"]["num_spec_tokens"] == 5
    usage = body.pop("usage")
    assert body == {
        "type": "message", "role": "assistant", "model": "tiny", "content": [{"type": "text", "text": fake.reply}],
        "stop_reason": "end_turn", "stop_sequence": None,
    }
    num_prompt, num_reply = len(fake.calls[0].prompt), len(fake.tokenizer.encode(fake.reply))
    assert usage == {  # what the cache had is counted apart
        "input_tokens": num_prompt - 3,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 3,
        "output_tokens": num_reply,
        "output_tokens_details": {"thinking_tokens": 0},
    }


def test_the_events_of_a_stream_come_in_anthropics_order(client: TestClient, fake: FakeEngine) -> None:
    events = streamed(client)
    kinds = [event["type"] for event in events]
    num_steps = (len(fake.tokenizer.encode(fake.reply)) + 1) // 2
    assert kinds == [
        "message_start", "ping", "content_block_start", *["content_block_delta"] * num_steps, "content_block_stop", "message_delta",
        "message_stop",
    ]
    start = events[0]["message"]
    assert start["content"] == [] and start["stop_reason"] is None
    assert (start["usage"]["input_tokens"], start["usage"]["cache_read_input_tokens"]) == (len(fake.calls[0].prompt) - 3, 3)
    assert joined(events) == [{"type": "text", "text": fake.reply}]
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"] == whole(client)["usage"]


def test_parameters_reach_the_engine(client: TestClient, fake: FakeEngine) -> None:
    whole(client, temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["\n\n", "END"], seed=3, speculation={"method": "off"})
    params = fake.calls[0].params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens, params.seed) == (0.5, 0.9, 7, 40, 3)
    assert list(params.stop) == ["\n\n", "END"] and params.speculation_settings.method == "off"


def test_what_anthropic_knows_and_a_local_model_has_no_use_for_passes(client: TestClient) -> None:
    cached = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    nothing = {"metadata": {"user_id": "u"}, "service_tier": "auto", "context_management": {"edits": []}, "mcp_servers": []}
    whole(client, system=[cached], messages=[{"role": "user", "content": [cached | {"citations": None}]}], **nothing)
    counted = [line for line in client.get("/metrics").text.splitlines() if line.startswith("foretoken:unknown_request_fields_total")]
    assert counted == ["foretoken:unknown_request_fields_total 0.0"]


def test_more_than_the_context_holds_may_be_asked_for(client: TestClient, fake: FakeEngine) -> None:
    whole(client, max_tokens=64_000)
    assert fake.calls[0].params.max_tokens is None  # the engine's word for: to the context's end


def test_calls_of_tools_are_blocks(hermes: TestClient, fake: FakeEngine) -> None:
    fake.reply = CALLS
    body = whole(hermes, tools=TOOLS)
    assert body["stop_reason"] == "tool_use"
    ids = [block["id"] for block in body["content"][1:]]
    assert len(set(ids)) == 2 and all(ids)
    expected = [
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "name": "weather", "input": {"city": "Paris"}},
        {"type": "tool_use", "name": "time", "input": {}},
    ]
    assert without_ids(body["content"]) == expected
    events = streamed(hermes, tools=TOOLS)
    assert without_ids(joined(events)) == expected and events[-2]["delta"]["stop_reason"] == "tool_use"
    prompt = fake.prompt(0)
    assert prompt.startswith('[{"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters":')


def test_one_call_only_where_parallel_ones_are_disabled(hermes: TestClient, fake: FakeEngine) -> None:
    fake.reply = CALLS
    body = whole(hermes, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block["type"] for block in body["content"]] == ["text", "tool_use"]


@pytest.mark.parametrize(
    ("choice", "constrained", "told"),
    [
        ({"type": "auto"}, False, ["weather", "time"]), ({"type": "any"}, True, ["weather", "time"]),
        ({"type": "tool", "name": "time"}, True, ["time"]), ({"type": "none"}, False, []),
    ],
)
def test_tool_choice(hermes: TestClient, fake: FakeEngine, choice: dict[str, Any], constrained: bool, told: list[str]) -> None:
    whole(hermes, tools=TOOLS, tool_choice=choice)
    assert (fake.calls[0].params.grammar is not None) is constrained
    prompt = fake.prompt(0)
    assert [name for name in ("weather", "time") if f'"name": "{name}"' in prompt] == told


def test_arguments_that_break_off_are_kept_as_text(hermes: TestClient, fake: FakeEngine) -> None:
    fake.reply = '<tool_call>\n{"name": "weather", "arguments": {"city": "Par'
    (block,) = whole(hermes, tools=TOOLS)["content"]
    assert block["input"] == {"INVALID_JSON": '{"city": "Par'}


def test_thinking_is_shown_to_those_who_ask_for_it(hermes: TestClient, fake: FakeEngine) -> None:
    fake.reply = "Hm, hm.</think>\n\nParis."
    asked = {"max_tokens": 200, "thinking": {"type": "enabled", "budget_tokens": 100}}
    expected = [{"type": "thinking", "thinking": "Hm, hm.", "signature": ""}, {"type": "text", "text": "Paris."}]
    body = whole(hermes, **asked)
    assert body["content"] == expected and joined(streamed(hermes, **asked)) == expected
    assert body["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    assert fake.prompt(0).endswith("<think>\n")
    assert fake.calls[0].params.thinking.max_tokens == 100
    for display in ("summarized", "updates"):  # the second is what Claude Code wants where another program reads its output
        assert whole(hermes, max_tokens=200, thinking={"type": "adaptive", "display": display})["content"] == expected
    hidden = whole(hermes, max_tokens=200, thinking={"type": "adaptive", "display": "omitted"})
    assert hidden["content"] == expected[1:] and fake.calls[-1].params.thinking is None


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}])
def test_thinking_is_off_by_default(hermes: TestClient, fake: FakeEngine, thinking: object) -> None:
    assert whole(hermes, thinking=thinking)["content"] == [{"type": "text", "text": fake.reply}]
    assert fake.prompt(0).endswith("<think></think>")
    assert fake.calls[0].params.thinking.max_tokens == 0


def test_a_format_of_the_answer(client: TestClient, fake: FakeEngine) -> None:
    form = {"type": "json_schema", "schema": CITY}
    for told in ({"output_config": {"format": form, "effort": "low"}}, {"output_format": form}):
        whole(client, **told)
        grammar = fake.calls[-1].params.grammar
        assert grammar.kind == "json_schema" and json.loads(grammar.text) == CITY


def test_tokens_are_counted_as_the_prompt_has_them(hermes: TestClient, fake: FakeEngine) -> None:
    prompt = {"messages": ASK["messages"], "system": "Be brief.", "tools": TOOLS, "tool_choice": {"type": "any"}}
    counted = hermes.post(ROUTE + "/count_tokens", json={"model": "tiny"} | prompt)
    assert counted.status_code == 200 and not fake.calls
    whole(hermes, **prompt)
    assert counted.json() == {"input_tokens": len(fake.calls[0].prompt)}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"temperature": -1}, "temperature must be a number"),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"stop_sequences": "END"}, "stop_sequences"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 40}}, "must be below max_tokens"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers is not supported"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305' is not available"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema: Field required"),
        ({"tools": [{"name": "f", "input_schema": {"required": "city"}}]}, "tools.0.input_schema"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, "not among the tools: other"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "names the tool"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "objct"}}}}, "schema"),
    ],
)
def test_refusals_say_what_to_change(hermes: TestClient, fields: dict[str, Any], says: str) -> None:
    answer = hermes.post(ROUTE, json=ASK | fields)
    body = answer.json()
    assert answer.status_code == 400 and body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert says in body["error"]["message"], body


def test_clients_learn_that_no_conversation_is_kept(client: TestClient) -> None:
    error = client.post(ROUTE, json=ASK | {"thread": {"type": "create"}}).json()["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request"} and "send all messages" in error["message"]


def test_a_template_without_tools_is_told(client: TestClient) -> None:
    answer = client.post(ROUTE, json=ASK | {"tools": TOOLS})
    assert answer.status_code == 400 and "cannot call tools" in answer.json()["error"]["message"]
