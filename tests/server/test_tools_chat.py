"""Tools and reasoning through the API: what the template gets, what a client gets, streamed or not, and what is refused."""

import json
from typing import Any

import asking
import pytest
from asking import CHAT, answer, chunks
from fake_engine import FakeEngine
from hermes import CALLS, THINKING
from hermes import TEMPLATE as HERMES
from starlette.testclient import TestClient
from transformers import PreTrainedTokenizerBase

from foretoken.engine.request import FinishReason
from foretoken.server.reasoning import REASONING_FORMATS, ReasoningFormat

ROUTE = "/v1/chat/completions"


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}} | more}


TOOLS = [tool("weather", description="Of a city", strict=True), tool("time")]


@pytest.fixture
def hermes(fake: FakeEngine) -> TestClient:
    return client_of(fake, HERMES)


def client_of(fake: FakeEngine, template: str, **settings: Any) -> TestClient:
    fake.tokenizer.chat_template = template
    return fake.client(**settings)


def whole(client: TestClient, **fields: Any) -> dict[str, Any]:
    return answer(client, ROUTE, CHAT | fields)


def reply(client: TestClient, **fields: Any) -> dict[str, Any]:
    return whole(client, **fields)["choices"][0]["message"]


def streamed(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    return chunks(client, ROUTE, CHAT | fields)


def refusal(client: TestClient, **fields: Any) -> dict[str, Any]:
    return asking.refusal(client, ROUTE, CHAT | fields)


def test_calls_of_a_whole_answer(hermes: TestClient, fake: FakeEngine) -> None:
    fake.reply = CALLS
    (choice,) = whole(hermes, tools=TOOLS)["choices"]
    first, second = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": "Let me see.", "refusal": None}
    assert choice["finish_reason"] == "tool_calls"
    assert first["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'} and first["type"] == "function"
    assert second["function"] == {"name": "time", "arguments": "{}"} and first["id"] != second["id"]


def test_content_is_null_beside_calls_alone(hermes: TestClient, fake: FakeEngine) -> None:
    fake.reply = CALLS.partition("\n")[2]
    assert reply(hermes, tools=TOOLS)["content"] is None


def test_calls_of_a_stream_come_as_openais(hermes: TestClient, fake: FakeEngine) -> None:
    """First the name, with an id and no arguments, then the arguments in pieces; one part a chunk."""
    fake.reply = CALLS
    choices = [chunk["choices"][0] for chunk in streamed(hermes, tools=TOOLS)]
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0] == {"role": "assistant", "content": ""} and all(len(delta) <= 1 for delta in deltas[1:])
    assert "".join(delta.get("content", "") for delta in deltas) == "Let me see."
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    begun = [call for call in calls if "id" in call]
    assert [call["index"] for call in begun] == [0, 1] and begun[0]["id"] != begun[1]["id"]
    assert all(call["type"] == "function" and call["function"]["arguments"] == "" for call in begun)
    assert [call["function"]["name"] for call in begun] == ["weather", "time"]
    assert calls[0] is begun[0] and [call["index"] for call in calls] == sorted(call["index"] for call in calls)
    pieces = [call for call in calls if "id" not in call]
    assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in pieces)
    said = ["".join(call["function"]["arguments"] for call in pieces if call["index"] == index) for index in (0, 1)]
    assert said == ['{"city": "Paris"}', "{}"] and len(pieces) > 3
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["tool_calls"]


def test_every_choice_has_its_own_calls(hermes: TestClient, fake: FakeEngine) -> None:
    fake.reply = CALLS
    choices = whole(hermes, tools=TOOLS, n=3)["choices"]
    ids = [call["id"] for choice in choices for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 6 and all(choice["finish_reason"] == "tool_calls" for choice in choices)


def test_a_stream_without_calls_is_what_it_was(hermes: TestClient, fake: FakeEngine) -> None:
    fake.reply = "1 < 2 <tool_call> is no call <tool"
    chunks = streamed(hermes, tools=TOOLS)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == fake.reply
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop" and "metrics" in chunks[-1]
    assert reply(hermes, tools=TOOLS)["content"] == fake.reply


def test_a_call_that_is_cut_before_its_name_is_not_told(hermes: TestClient, fake: FakeEngine) -> None:
    """By a limit or a stop string: what the model ended itself comes as it is."""
    fake.reply = 'So. <tool_call>\n{"name": "wea'
    assert reply(hermes, tools=TOOLS)["content"] == fake.reply
    endings: list[tuple[FinishReason, str | None]] = [("length", None), ("stop", "ther")]
    for fake.ending in endings:
        (choice,) = whole(hermes, tools=TOOLS)["choices"]
        assert choice["message"] == {"role": "assistant", "content": "So.", "refusal": None}
        assert (choice["finish_reason"], choice["stop_reason"]) == fake.ending
        deltas = [chunk["choices"][0]["delta"] for chunk in streamed(hermes, tools=TOOLS)]
        assert "".join(delta.get("content", "") for delta in deltas) == "So." and not any("tool_calls" in delta for delta in deltas)
    fake.reply = "Write <tool_call> and <tool"
    assert reply(hermes, tools=TOOLS)["content"] == fake.reply


def test_a_call_that_is_cut_in_its_arguments_is_not_to_be_made(hermes: TestClient, fake: FakeEngine) -> None:
    both, one = CALLS.removesuffix("\n</tool_call>"), CALLS.partition("Paris")[0]
    endings: list[tuple[FinishReason, str | None]] = [("length", None), ("stop", "Paris"), ("stop", None)]
    for fake.ending in endings:
        for fake.reply, told in ((both, "tool_calls"), (both.removesuffix("{}}"), "stop"), (one, "stop")):
            expected = "length" if fake.ending[0] == "length" else told if fake.ending[1] else "tool_calls"
            assert whole(hermes, tools=TOOLS)["choices"][0]["finish_reason"] == expected
            assert streamed(hermes, tools=TOOLS)[-1]["choices"][0]["finish_reason"] == expected


def test_logprobs_of_a_stream_with_calls_are_those_of_every_token(hermes: TestClient, fake: FakeEngine) -> None:
    fake.reply = CALLS
    chunks = streamed(hermes, tools=TOOLS, logprobs=True)
    content = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert "".join(entry["token"] for entry in content) == fake.reply
    usage = streamed(hermes, tools=TOOLS, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert usage[-1]["usage"]["completion_tokens"] == len(content)


def test_parallel_calls_can_be_declined(hermes: TestClient, fake: FakeEngine) -> None:
    fake.reply = CALLS
    message = reply(hermes, tools=TOOLS, parallel_tool_calls=False)
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]
    fake.reply, fake.ending = CALLS.partition("{}")[0] + "{", ("stop", "}")  # the one that is told is whole
    assert whole(hermes, tools=TOOLS, parallel_tool_calls=False)["choices"][0]["finish_reason"] == "tool_calls"


def test_the_template_gets_the_tools(hermes: TestClient, fake: FakeEngine) -> None:
    whole(hermes, tools=TOOLS)
    offered, _, rest = fake.prompt().partition("<tool_call>")
    weather = {"name": "weather", "description": "Of a city", "parameters": {"type": "object", "properties": {}}}
    assert json.loads(offered) == [{"type": "function", "function": weather}, tool("time")] and rest == "<|user|>Hi<|end|><|assistant|>"


def test_none_means_that_the_model_hears_of_no_tools(hermes: TestClient, fake: FakeEngine) -> None:
    fake.reply = CALLS
    message = reply(hermes, tools=TOOLS, tool_choice="none")
    assert message["content"] == CALLS and "tool_calls" not in message and fake.prompt().startswith("<|user|>")


def test_allowed_tools_are_those_the_model_hears_of(hermes: TestClient, fake: FakeEngine) -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "time"}}]}
    whole(hermes, tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert json.loads(fake.prompt().partition("<tool_call>")[0]) == [tool("time")] and fake.calls[-1].params.grammar is None


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", ["weather", "time"]),
        ({"type": "function", "function": {"name": "time"}}, ["time"]),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "time"}}]}},
            ["time"],
        ),
    ],
)
def test_a_call_that_must_be_made_is_a_grammar(hermes: TestClient, fake: FakeEngine, choice: Any, names: list[str]) -> None:
    fake.reply = CALLS
    assert whole(hermes, tools=TOOLS, tool_choice=choice)["choices"][0]["finish_reason"] == "tool_calls"
    grammar = fake.calls[-1].params.grammar
    assert grammar is not None and grammar.kind == "grammar"
    assert [name for name in ("weather", "time") if f'\\"{name}\\"' in grammar.text] == names
    assert "{0,15}" in grammar.text
    whole(hermes, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    assert "{0,15}" not in fake.calls[-1].params.grammar.text


def test_a_conversation_with_calls_and_results(hermes: TestClient, fake: FakeEngine) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":  "Paris"}'}}
    messages = [
        *CHAT["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "reasoning_content": "Hm"},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "Sunny"}]},
    ]
    whole(hermes, messages=messages)
    rest = '<|end|><|tool|>Sunny=call_1<|end|><|assistant|>'
    assert fake.prompt() == '<|user|>Hi<|end|><|assistant|>~Hm~weather({"city": "Paris"})' + rest
    call["function"]["arguments"] = "no JSON"  # a model may have written it
    whole(hermes, messages=messages)
    assert fake.prompt().endswith('weather("no JSON")' + rest)


def test_arguments_stay_as_written_where_the_template_takes_text(fake: FakeEngine) -> None:
    template = "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.function.arguments is string %}{{ c.function.arguments }}"
    client = client_of(fake, template + "{% endif %}{% endfor %}{% endfor %}")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a" :1}'}}
    whole(client, messages=[{"role": "assistant", "tool_calls": [call]}])
    assert fake.prompt() == '{"a" :1}'


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [tool("a b")]}, "tools.0.function.name"),
        ({"tools": [tool("f" * 129)]}, "tools.0.function.name"),
        ({"tools": [tool("f", parameters=[])]}, "tools.0.function.parameters"),
        ({"tools": [tool("f", parameters={"properties": []})]}, "tools.0.function.parameters"),
        ({"tools": [tool("f", parameters={"required": "a"})]}, "tools.0.function.parameters"),
        ({"tools": [tool("f"), tool("f")]}, "tools"),
        ({"tools": [tool(f"f{i}") for i in range(257)]}, "tools"),
        ({"tools": "f"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "time"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["f"]}}}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tools": TOOLS, "structured_outputs": {"regex": "a+"}}, "structured_outputs.regex"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"include_reasoning": "no"}, "include_reasoning"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages.0"),
        ({"messages": [{"role": "user", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}]}, "messages.0"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages.0.tool_calls.0.function"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {}}}]}]},
            "messages.0.tool_calls.0.function.arguments",
        ),
    ],
)
def test_mistakes_are_named(hermes: TestClient, fake: FakeEngine, fields: dict[str, Any], param: str) -> None:
    error = refusal(hermes, **fields)
    assert error["param"] == param and error["type"] == "invalid_request_error", error
    assert not fake.calls


def test_harmless_choices_need_no_tools(hermes: TestClient) -> None:
    for fields in ({"tools": [], "tool_choice": "auto"}, {"tool_choice": "none"}, {"tools": None, "parallel_tool_calls": True}):
        whole(hermes, **fields)


def test_a_model_without_tools_says_so(client: TestClient, fake: FakeEngine) -> None:
    error = refusal(client, tools=TOOLS)
    assert error["param"] == "tools" and "chat template" in error["message"]
    unknown = client_of(fake, "{{ tools }}{{ messages }}")
    assert "--tool-call-parser" in refusal(unknown, tools=TOOLS)["message"]
    assert "--tool-call-parser" in refusal(client_of(fake, HERMES, tool_call_parser="none"), tools=TOOLS)["message"]


def test_the_parsers_flag_overrides_the_template(fake: FakeEngine) -> None:
    fake.reply = "[TOOL_CALLS]time[ARGS]{}"
    client = client_of(fake, HERMES, tool_call_parser="mistral")
    (call,) = reply(client, tools=TOOLS)["tool_calls"]
    assert call["function"]["name"] == "time" and len(call["id"]) == 9


GRANITE = (
    "{% if tools %}<|tool_call|> before a list: {{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'system' and 'tools' in m and m['tools'] is not none %}"
    "<|tool|>{{ m['tools'] }}<|/tool|>{% endif %}<|end|>{% endfor %}"
)


def test_a_template_that_leaves_earlier_calls_out_gets_them_as_the_model_wrote_them(fake: FakeEngine) -> None:
    """Those of Granite 3 and Phi-4-mini write the content alone, and the model would see results of nothing."""
    fake.reply = '<|tool_call|>[{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "time", "arguments": {}}]'
    client = client_of(fake, GRANITE)
    message = reply(client, tools=TOOLS)
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in message["tool_calls"]]
    whole(client, messages=[*CHAT["messages"], message, *results])
    assert fake.prompt().endswith(f"<|assistant|>{fake.reply}<|end|><|tool|>x<|end|><|tool|>x<|end|>")


KIMI = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% if m.tool_call_id %}## Return of {{ m.tool_call_id }}{% endif %}{% if m.tool_calls %}<|tool_calls_section_begin|>"
    "{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}"
    "<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}<|end|>{% endfor %}<|assistant|><think></think>"
)


def test_kimi_sees_the_ids_again_that_it_wrote(fake: FakeEngine) -> None:
    section = "<|tool_calls_section_begin|>%s<|tool_calls_section_end|>"
    call = "<|tool_call_begin|>functions.time:%d<|tool_call_argument_begin|>{}<|tool_call_end|>"
    fake.reply = section % (call % 3 + call % 4)
    client = client_of(fake, KIMI)
    message = reply(client, tools=TOOLS)
    assert [call["id"] for call in message["tool_calls"]] == ["functions.time:3", "functions.time:4"]
    calls = [call for chunk in streamed(client, tools=TOOLS) for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert [call["id"] for call in calls if "id" in call] == ["functions.time:3", "functions.time:4"]
    whole(client, messages=[*CHAT["messages"], message, {"role": "tool", "tool_call_id": "functions.time:4", "content": "x"}])
    assert f"{fake.reply}<|end|><|tool|>x## Return of functions.time:4" in fake.prompt()
    fake.reply = section % (call % 0 * 2)
    first, second = reply(client, tools=TOOLS)["tool_calls"]
    assert first["id"] == "functions.time:0" and second["id"].startswith("call_"), "a result tells which call it is of"


def test_calls_that_end_kimis_reasoning_are_made(fake: FakeEngine) -> None:
    fake.reply = "<think>Hm <|tool_calls_section_begin|><|tool_call_begin|>functions.time:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    message = reply(client_of(fake, KIMI.removesuffix("<think></think>"), reasoning_parser="kimi_k2"), tools=TOOLS)
    assert message["reasoning"] == "Hm" and message["tool_calls"][0]["function"]["name"] == "time"


def test_a_template_that_takes_tools_from_the_system_gets_them_there(fake: FakeEngine) -> None:
    """As Phi-4-mini's: tools beside the messages would be lost, and the model told of none."""
    fake.reply = '<|tool_call|>[{"type": "function", "function": {"name": "time", "arguments": {}}}]<|/tool_call|>'
    client = client_of(fake, PHI)
    for system in ([], [{"role": "system", "content": "Be brief"}]):
        (call,) = reply(client, messages=[*system, *CHAT["messages"]], tools=TOOLS[1:])["tool_calls"]
        assert call["function"] == {"name": "time", "arguments": "{}"}
        offered = fake.prompt().split("<|tool|>")[1].split("<|/tool|>")[0]
        assert json.loads(offered) == [TOOLS[1]["function"]]
        assert fake.prompt().startswith("<|system|>Be brief<|tool|>" if system else "<|system|>You are")
    whole(client)
    assert "<|tool|>" not in fake.prompt()


def test_special_tokens_that_mark_calls_are_asked_for(fake: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no text otherwise; the tiny tokenizer's <|user|> stands for such a marker."""
    from foretoken.server.tools.llama3_json import Llama3Json

    whole(client_of(fake, HERMES, tool_call_parser="llama3_json"), tools=TOOLS)
    assert fake.calls[-1].params.skip_special_tokens
    monkeypatch.setattr(Llama3Json, "markers", ("<|user|>",))
    client = client_of(fake, HERMES, tool_call_parser="llama3_json")
    whole(client, tools=TOOLS)
    assert not fake.calls[-1].params.skip_special_tokens
    whole(client)
    assert fake.calls[-1].params.skip_special_tokens


def test_calls_without_a_marker_stay_free_for_strict_functions(fake: FakeEngine) -> None:
    whole(client_of(fake, HERMES, tool_call_parser="llama3_json"), tools=TOOLS)
    assert fake.calls[-1].params.grammar is None


def test_a_marker_may_be_a_special_token_and_a_word(fake: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Gemma 4's begin of reasoning; the tiny tokenizer's <|user|> stands for the token."""
    monkeypatch.setitem(REASONING_FORMATS, "gemma4", ReasoningFormat("<|user|>thought", "</think>"))
    fake.reply = "<|user|>thought\nHm</think>{}"
    client = client_of(fake, HERMES, reasoning_parser="gemma4")
    message = reply(client, response_format={"type": "json_object"})
    assert (message["reasoning"], message["content"]) == ("Hm", "{}")
    assert f'(<[{fake.tokenizer.convert_tokens_to_ids("<|user|>")}]> "thought" thoughts' in fake.calls[-1].params.grammar.text


def test_reasoning_is_a_part_of_its_own(fake: FakeEngine) -> None:
    fake.reply = "Paris? Easy.\n</think>\n\n" + CALLS
    client = client_of(fake, THINKING)
    fields = {"tools": TOOLS, "chat_template_kwargs": {"enable_thinking": True}}
    body = whole(client, **fields)
    message = body["choices"][0]["message"]
    assert (message["reasoning"], message["content"], len(message["tool_calls"])) == ("Paris? Easy.", "Let me see.", 2)
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed(client, **fields)]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Paris? Easy."
    assert all(said.get("reasoning_content") == said.get("reasoning") for said in (message, *deltas))
    assert "".join(delta.get("content", "") for delta in deltas) == "Let me see."
    spent, thought = body["usage"]["completion_tokens_details"]["reasoning_tokens"], fake.tokenizer.encode("Paris? Easy.\n</think>")
    assert spent == len(thought)


def test_reasoning_can_be_left_out(fake: FakeEngine) -> None:
    fake.reply = "Easy.</think>Two"
    client = client_of(fake, THINKING)
    fields = {"include_reasoning": False, "chat_template_kwargs": {"enable_thinking": True}}
    body = whole(client, **fields)
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Two", "refusal": None}
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    assert all(chunk["choices"][0]["delta"].keys().isdisjoint({"reasoning", "reasoning_content"}) for chunk in streamed(client, **fields))


def test_a_closed_reasoning_leaves_the_reply_alone(fake: FakeEngine) -> None:
    client = client_of(fake, THINKING)
    for fields in ({}, {"reasoning_effort": "none"}, {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": False}}):
        message = reply(client, **fields)
        assert message["content"] == fake.reply and "reasoning" not in message
    fake.reply = "<think>Hm</think>Two"
    assert reply(client)["reasoning"] == "Hm"
    plain = client_of(fake, THINKING, reasoning_parser="none")
    assert reply(plain)["content"] == fake.reply


def test_tokenize_counts_tools(hermes: TestClient, fake: FakeEngine) -> None:
    whole(hermes, tools=TOOLS)
    tokens = hermes.post("/tokenize", json=CHAT | {"tools": TOOLS}).json()["tokens"]
    assert tokens == fake.calls[-1].prompt


def test_an_answer_of_a_form_leaves_room_for_calls(hermes: TestClient, fake: FakeEngine, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}, "strict": True}}}
    fake.reply = '{"a": 1}'
    assert reply(hermes, **form)["content"] == '{"a": 1}'
    assert fake.calls[-1].params.grammar.kind == "json_schema"
    whole(hermes, tools=TOOLS, **form)
    assert "(calls | answer)" in fake.calls[-1].params.grammar.text
    whole(hermes, tools=TOOLS, tool_choice="required", **form)
    assert "answer" not in fake.calls[-1].params.grammar.text
