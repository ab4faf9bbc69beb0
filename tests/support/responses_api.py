"""What a client of the Responses API does in tests: ask, be refused, read a stream."""

import json
from typing import Any

import asking
from asking import answer
from starlette.testclient import TestClient

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}~{{ m.reasoning_content }}~{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
    "{% if m.tool_call_id %}={{ m.tool_call_id }}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{% if enable_thinking %}<think>\n{% else %}<think></think>{% endif %}"
)
"""Shows the model all that it is given, and thinks where it is told to."""

Event = dict[str, Any]


def create(api: TestClient, input: Any = "Hi", **fields: Any) -> dict[str, Any]:
    return answer(api, "/v1/responses", {"input": input} | fields)


def refusal(api: TestClient, input: Any = "Hi", **fields: Any) -> dict[str, Any]:
    return asking.refusal(api, "/v1/responses", {"input": input} | fields)


def events_of(text: str) -> list[Event]:
    """The events of a stream, in which every event's name is its type."""
    events: list[Event] = []
    for block in text.split("\n\n"):
        if block and not block.startswith(":"):
            name, data = block.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return events


def stream(api: TestClient, input: Any = "Hi", **fields: Any) -> list[Event]:
    response = api.post("/v1/responses", json={"input": input, "stream": True} | fields)
    assert response.status_code == 200, response.text
    return events_of(response.text)


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}} | more
