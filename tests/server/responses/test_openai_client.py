"""The embedded model behind the real server, asked by the real openai client through its Responses API and its helpers."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.responses import ResponseFunctionToolCall
from pydantic import BaseModel
from running_server import RunningServer, start_server

MODEL = "demo"
QUESTION = "What is the capital of France?"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "name": "get_weather", "description": "Get the weather in a city", "parameters": CITY, "strict": True}]
ENDLESS: Any = {"ignore_eos": True, "speculation": {"method": "off"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("responses")
    flags = ["--served-model-name", MODEL, "--api-key", "one", "--response-store", str(folder / "store")]
    running = start_server(flags, folder / "log")
    yield running
    assert running.stop() == 0
    assert "Traceback" not in running.log


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key="one", max_retries=0, timeout=120) as client:
        yield client


def settled(server: RunningServer) -> float:
    """Tokens generated in all, once nothing runs."""
    deadline = time.monotonic() + 60
    while True:
        lines = httpx.get(server.url + "/metrics").text.splitlines()
        told = {line.split("{")[0]: float(line.split()[-1]) for line in lines if line.startswith("vllm:")}
        if told["vllm:num_requests_running"] == told["vllm:num_requests_waiting"] == 0:
            return told["vllm:generation_tokens_total"]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_stream_says_what_the_whole_response_says(client: OpenAI) -> None:
    whole = client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=40)
    assert whole.status == "completed" and whole.output_text and whole.usage and whole.usage.output_tokens <= 40
    with client.responses.stream(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=40) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == whole.output_text and final.usage and final.usage.output_tokens == whole.usage.output_tokens
    assert client.responses.retrieve(final.id).output_text == text



def test_the_end_of_the_tokens_is_incomplete(client: OpenAI) -> None:
    whole = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=3, extra_body=ENDLESS)
    assert whole.status == "incomplete" and whole.incomplete_details and whole.incomplete_details.reason == "max_output_tokens"
    assert whole.completed_at is None
    events = list(client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=3, extra_body=ENDLESS, stream=True))
    assert events[-1].type == "response.incomplete" and events[-1].response.output[0].type == "message"
    assert events[-1].response.output[0].status == "incomplete"


class Place(BaseModel):
    city: str
    country: str


def test_parse_gives_an_object(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "input": "Name a city and its country.", "text_format": Place, "temperature": 0, "max_output_tokens": 150}
    parsed = client.responses.parse(**asked)
    assert parsed.status == "completed" and isinstance(parsed.output_parsed, Place)
    with client.responses.stream(**asked) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Place)


def test_a_tool_is_called_and_answered(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "tools": TOOLS, "temperature": 0, "max_output_tokens": 100}
    first = client.responses.create(
        input="What is the weather in Paris?", tool_choice="required", parallel_tool_calls=False, **asked
    )
    (call,) = first.output
    assert isinstance(call, ResponseFunctionToolCall) and call.name == "get_weather" and json.loads(call.arguments).keys() == {"city"}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny, 20 C"}
    chained = client.responses.create(input=[result], previous_response_id=first.id, **asked)
    again: Any = [{"role": "user", "content": "What is the weather in Paris?"}, *[item.to_dict() for item in first.output], result]
    by_hand = client.responses.create(input=again, store=False, **asked)
    assert chained.output_text and chained.output_text == by_hand.output_text
    with client.responses.stream(input="Weather in Rome?", tool_choice={"type": "function", "name": "get_weather"}, **asked) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response().output[0]
    assert isinstance(final, ResponseFunctionToolCall) and final.arguments == "".join(pieces) and json.loads(final.arguments)


def test_a_conversation_is_kept_listed_and_deleted(client: OpenAI) -> None:
    first = client.responses.create(model=MODEL, input=QUESTION, temperature=0)
    second = client.responses.create(model=MODEL, input="And of Italy?", temperature=0, previous_response_id=first.id)
    turns: Any = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And of Italy?"},
    ]
    assert client.responses.create(model=MODEL, input=turns, temperature=0).output_text == second.output_text
    items = list(client.responses.input_items.list(second.id, order="asc", limit=1))  # the client turns the pages
    assert [item.type for item in items] == ["message"] * 3 and items[1].to_dict()["id"] == first.output[0].id
    client.responses.delete(first.id)
    for ask in (client.responses.retrieve, client.responses.cancel, client.responses.input_items.list, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            ask(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="x", previous_response_id=second.id)
    assert caught.value.code == "previous_response_not_found" and first.id in str(caught.value)



def test_in_the_background_it_outlives_its_reader_and_is_cancelled(client: OpenAI, server: RunningServer) -> None:
    stream = client.responses.create(model=MODEL, input="Tell me a story.", background=True, stream=True, extra_body=ENDLESS)
    seen = [next(stream) for _ in range(8)]
    stream.close()
    assert seen[0].type == "response.created"
    id = seen[0].response.id
    with client.responses.stream(response_id=id, starting_after=seen[-1].sequence_number) as more:
        event = next(iter(more))
        while event.sequence_number <= seen[-1].sequence_number:
            event = next(iter(more))
    assert event.sequence_number == seen[-1].sequence_number + 1
    told = client.responses.cancel(id)
    assert told.status in ("cancelled", "incomplete") and told.output_text and told.usage
    assert client.responses.retrieve(id).output_text == told.output_text
    polled = client.responses.create(model=MODEL, input=QUESTION, background=True, max_output_tokens=20)
    deadline = time.monotonic() + 60
    while (told := client.responses.retrieve(polled.id)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert told.output_text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_the_generation(client: OpenAI, server: RunningServer, stream: bool) -> None:
    before = settled(server)
    body = {"model": MODEL, "input": "Tell me a story.", "stream": stream} | ENDLESS
    headers = {"Authorization": "Bearer one"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=30 if stream else 0.3) as impatient:
        if stream:
            with impatient.stream("POST", "/v1/responses", json=body) as answer:
                next(answer.iter_raw())
        else:
            with pytest.raises(httpx.ReadTimeout):
                impatient.post("/v1/responses", json=body)
    assert settled(server) - before < 1900  # of some 2,030 that the context has room for



def test_many_at_once_with_the_asynchronous_client(server: RunningServer) -> None:
    async def ask(client: AsyncOpenAI, number: int) -> str:
        async with client.responses.stream(model=MODEL, input=f"Say {number}.", temperature=0, max_output_tokens=12) as stream:
            events = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        return "".join(event.delta for event in events if event.type == "response.output_text.delta")

    async def all() -> None:
        async with AsyncOpenAI(base_url=server.url + "/v1", api_key="one", max_retries=0, timeout=120) as client:
            streamed = await asyncio.gather(*(ask(client, number) for number in range(8)))
            for number, text in enumerate(streamed):
                whole = await client.responses.create(model=MODEL, input=f"Say {number}.", temperature=0, max_output_tokens=12)
                assert whole.output_text == text

    asyncio.run(all())
