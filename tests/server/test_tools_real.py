"""The embedded model behind the real server calls functions through the real openai client; a grammar makes it where it must."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
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
