"""The embedded model behind the real server calls functions through the real openai client; a grammar makes it where it must."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from running_server import RunningServer, start_server

from foretoken.engine.model_folder import embedded

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "Get the weather in a city", "parameters": CITY}},
    {"type": "function", "function": {"name": "get_time", "description": "Get the time of day"}},
]
QUESTION: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    running = start_server(["--served-model-name", "demo"], tmp_path_factory.mktemp("tools") / "log")
    yield running
    assert running.stop() == 0
    assert "Traceback" not in running.log


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def ask(client: OpenAI, **fields: Any) -> Any:
    settings = {"model": "demo", "messages": QUESTION, "tools": TOOLS, "temperature": 0, "max_tokens": 200}
    return client.chat.completions.create(**(settings | fields))


def check(name: str, arguments: str) -> None:
    said = json.loads(arguments)
    if name == "get_weather":
        assert said.keys() == {"city", "unit"} and said["unit"] in ("celsius", "fahrenheit") and len(said["city"]) <= 20
    else:
        assert name == "get_time" and isinstance(said, dict)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_required_call_always_fits_its_schema(client: OpenAI, temperature: float) -> None:
    answer = ask(client, tool_choice="required", parallel_tool_calls=False, n=4, seed=1, temperature=temperature)
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        (call,) = choice.message.tool_calls
        check(call.function.name, call.function.arguments)


def test_a_named_function_is_called_with_and_without_speculation(client: OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    told = []
    for method in ("auto", "off"):
        answer = ask(client, tool_choice=named, parallel_tool_calls=False, extra_body={"speculation": {"method": method}})
        (call,) = answer.choices[0].message.tool_calls
        check(call.function.name, call.function.arguments)
        told.append((call.function.name, call.function.arguments))
    assert told[0] == told[1] and told[0][0] == "get_weather"


def test_a_stream_tells_the_same_call(client: OpenAI) -> None:
    fields = {"tool_choice": "required", "parallel_tool_calls": False}
    (call,) = ask(client, **fields).choices[0].message.tool_calls
    name, arguments, reason = "", "", None
    for chunk in ask(client, stream=True, **fields):
        choice = chunk.choices[0]
        assert not choice.delta.content
        for delta in choice.delta.tool_calls or ():
            assert delta.index == 0
            name += delta.function.name or ""
            arguments += delta.function.arguments or ""
        reason = choice.finish_reason or reason
    assert (name, arguments, reason) == (call.function.name, call.function.arguments, "tool_calls")


def test_the_clients_stream_helper_puts_calls_together(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model="demo", messages=QUESTION, tools=TOOLS, tool_choice="required", temperature=0, max_tokens=200
    ) as stream:
        events = list(stream)
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [event.arguments for event in done] == [call.function.arguments for call in message.tool_calls]
    for call in message.tool_calls:
        check(call.function.name, call.function.arguments)


def test_a_result_goes_back_to_the_model(client: OpenAI) -> None:
    message = ask(client, tool_choice="required", parallel_tool_calls=False).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": '{"temperature": 21}'}
    answer = ask(client, messages=[*QUESTION, message, result], tool_choice="none")
    assert answer.choices[0].finish_reason in ("stop", "length") and answer.choices[0].message.tool_calls is None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0 or answer.choices[0].message.content is not None


def test_a_free_choice_is_told_as_what_it_is(client: OpenAI) -> None:
    """Whether it calls is the model's matter; what it says is all there either way."""
    plain = ask(client, extra_body={"skip_special_tokens": False})
    choice = plain.choices[0]
    if choice.message.tool_calls:
        assert choice.finish_reason in ("tool_calls", "length")
    else:
        assert choice.message.content and choice.finish_reason in ("stop", "length")


def test_mistakes_are_the_clients_bad_requests(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as refused:
        ask(client, tool_choice={"type": "function", "function": {"name": "other"}})
    assert refused.value.param == "tool_choice"
    with pytest.raises(BadRequestError) as refused:
        pattern = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}
        ask(client, tools=[{"type": "function", "function": {"name": "f", "parameters": pattern}}], tool_choice="required")
    assert refused.value.param == "tools"


KIMI = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}{{ m.role }}: {{ m.content or '' }}{% if m.tool_calls %}"
    "<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}\n"
    "{% endfor %}assistant: "
)


def test_a_template_chooses_the_format(tmp_path: Path) -> None:
    """Kimi's, whose ids are the model's own, streamed or not."""
    folder = tmp_path / "model"
    shutil.copytree(embedded("target"), folder)
    (folder / "chat_template.jinja").write_text(KIMI)
    running = start_server([str(folder), "--served-model-name", "demo"], tmp_path / "log")
    try:
        assert "tool calls as kimi_k2" in running.log
        with OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
            fields = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 400}
            message = ask(client, **fields).choices[0].message
            (call,) = message.tool_calls
            check(call.function.name, call.function.arguments)
            assert call.id.rpartition(":")[0] == f"functions.{call.function.name}" and message.content is None
            chunks = list(ask(client, stream=True, **fields))
            deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or ()]
            assert [delta.id for delta in deltas if delta.id] == [call.id]
            assert "".join(delta.function.arguments or "" for delta in deltas) == call.function.arguments
            result = {"role": "tool", "tool_call_id": call.id, "content": "21"}
            assert ask(client, messages=[*QUESTION, message, result], max_tokens=5).choices[0].finish_reason == "length"
    finally:
        assert running.stop() == 0
    assert "Traceback" not in running.log
