"""Anthropic's Python client against the embedded model: messages whole and streamed, tools, counting, structured output, errors."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, Field
from running_server import RunningServer

anthropic: Any = pytest.importorskip("anthropic", reason="Anthropic's client is not installed: pip install 'foretoken[clients]'")

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
TOOLS: Any = [
    {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "input_schema": {
            "type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"],
            "additionalProperties": False,
        },
    }
]
ASK_WEATHER: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def client(server: RunningServer, api_key: str) -> Iterator[Any]:
    """It sends its key as x-api-key."""
    with anthropic.Anthropic(base_url=server.url, api_key=api_key, max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def fields(model_name: str) -> dict[str, Any]:
    """Client 2.x has no temperature any more; the API does."""
    return {"model": model_name, "max_tokens": 60, "messages": QUESTION, "extra_body": {"temperature": 0}}


def test_whole_streamed_and_asynchronous_agree(client: Any, fields: dict[str, Any], server: RunningServer, api_key: str) -> None:
    message = client.messages.create(**fields)
    assert message.id.startswith("msg_") and message.type == "message" and message.role == "assistant"
    assert message._request_id
    (block,) = message.content
    assert block.type == "text" and block.text and message.stop_reason in ("end_turn", "max_tokens")
    assert message.usage.input_tokens > 0 and message.usage.output_tokens > 0

    with client.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == block.text
    assert (final.stop_reason, final.usage.output_tokens) == (message.stop_reason, message.usage.output_tokens)

    (card,) = client.models.list()
    assert (card.type, card.id, card.display_name) == ("model", fields["model"], fields["model"]) and card.created_at.year > 2024

    async def bearer() -> str:
        async with anthropic.AsyncAnthropic(base_url=server.url, auth_token=api_key, max_retries=0) as client:
            answer = await client.messages.create(**fields)
            return answer.content[0].text

    assert asyncio.run(bearer()) == block.text


def test_a_conversation_with_a_tool(client: Any, fields: dict[str, Any]) -> None:
    asked = fields | {"messages": ASK_WEATHER, "tools": TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    message = client.messages.create(**asked | {"max_tokens": 200})
    assert message.stop_reason == "tool_use"
    (call,) = message.content
    assert call.type == "tool_use" and call.name == "get_weather" and call.input.keys() == {"city"}
    with client.messages.stream(**asked | {"max_tokens": 200}) as stream:
        partial = [event.partial_json for event in stream if event.type == "input_json"]
        streamed = stream.get_final_message()
    assert partial and streamed.content[0].input == call.input and streamed.stop_reason == "tool_use"

    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Sunny, 21 degrees"}]}
    turns = [*ASK_WEATHER, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(**fields | {"messages": turns, "tools": TOOLS, "tool_choice": {"type": "none"}})
    assert answer.content[0].type == "text" and answer.content[0].text


def test_the_clients_own_loop_runs_tools(client: Any, fields: dict[str, Any]) -> None:
    """It tries to have the server keep the conversation, learns that it does not, and sends all of it."""
    asked: list[str] = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Get the weather in a city"""
        asked.append(city)
        return "Sunny, 21 degrees"

    choice = {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    runner = client.beta.messages.tool_runner(**fields | choice, tools=[get_weather], max_iterations=2)
    messages = list(runner)
    assert [message.stop_reason for message in messages] == ["tool_use"] * 2 and len(asked) == 2


def test_counting_is_what_a_message_costs(client: Any, fields: dict[str, Any]) -> None:
    prompt = {"model": fields["model"], "system": "Answer briefly.", "messages": QUESTION, "tools": TOOLS}
    counted = client.messages.count_tokens(**prompt).input_tokens
    usage = client.messages.create(**prompt, max_tokens=1).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def test_stop_sequences_and_a_prefilled_answer(client: Any, fields: dict[str, Any]) -> None:
    message = client.messages.create(**fields | {"stop_sequences": ["France"]})
    assert message.stop_reason == "stop_sequence" and message.stop_sequence == "France"
    begun = [*QUESTION, {"role": "assistant", "content": message.content[0].text + "France is"}]
    assert client.messages.create(**fields | {"messages": begun}).content[0].text.strip()


def test_parse_gives_an_object(client: Any, fields: dict[str, Any]) -> None:
    class Capital(BaseModel):
        city: str = Field(max_length=20)

    parsed = client.messages.parse(**fields, output_format=Capital).parsed_output
    assert isinstance(parsed, Capital) and parsed.city


def test_errors_have_their_own_classes(client: Any, fields: dict[str, Any], server: RunningServer) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**fields | {"model": "claude"})
    assert missing.value.body["error"]["type"] == "not_found_error" and missing.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="reads text only"):
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
        client.messages.create(**fields | {"messages": [{"role": "user", "content": [image]}]})
    with pytest.raises(anthropic.BadRequestError, match="budget_tokens"):
        client.messages.create(**fields | {"thinking": {"type": "enabled", "budget_tokens": 1024}})
    with anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError):
            stranger.messages.create(**fields)
