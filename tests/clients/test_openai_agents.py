"""OpenAI's Agents SDK, over chat completions and over the Responses API: typed output, tools, hand-overs to another agent."""

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from capitals import ASKED, Capital
from openai import AsyncOpenAI

agents: Any = pytest.importorskip("agents")
Agent, Runner = agents.Agent, agents.Runner

pytestmark = pytest.mark.slow


@pytest.fixture
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as loop:
        yield loop


@pytest.fixture(params=[agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel])
def agent_model(request: pytest.FixtureRequest, loop: asyncio.Runner, base_url: str, api_key: str, model_name: str) -> Iterator[Any]:
    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    yield request.param(model=model_name, openai_client=client)
    loop.run(client.close())


def settings(**more: Any) -> Any:
    return agents.ModelSettings(temperature=0, max_tokens=1000, extra_body={"frequency_penalty": 1.0}, **more)


def test_typed_output(agent_model: Any, loop: asyncio.Runner) -> None:
    agent = Agent(name="a", model=agent_model, output_type=Capital, model_settings=settings())
    result = loop.run(Runner.run(agent, ASKED))
    assert isinstance(result.final_output, Capital)


def test_text_and_its_stream_agree(agent_model: Any, loop: asyncio.Runner) -> None:
    agent = Agent(name="a", model=agent_model, instructions="Answer in one sentence.", model_settings=settings())

    async def both() -> tuple[str, str]:
        whole = await Runner.run(agent, ASKED)
        stream = Runner.run_streamed(agent, ASKED)
        deltas = []
        async for event in stream.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                deltas.append(event.data.delta)
        return whole.final_output, "".join(deltas)

    whole, streamed = loop.run(both())
    assert whole and streamed == whole


def test_a_tool_is_run_and_the_answer_follows(agent_model: Any, loop: asyncio.Runner) -> None:
    asked: list[str] = []

    @agents.function_tool
    def weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather in a city."""
        asked.append(city)
        return "It is sunny."

    # After one call the choice is free again, as the SDK does by itself.
    must = settings(tool_choice="required", parallel_tool_calls=False)
    agent = Agent(name="a", model=agent_model, tools=[weather], model_settings=must)
    result = loop.run(Runner.run(agent, "What is the weather in Paris?", max_turns=5))
    assert asked and set(asked) <= {"Paris", "Rome"} and isinstance(result.final_output, str)


def test_a_hand_over(agent_model: Any, loop: asyncio.Runner) -> None:
    second = Agent(name="second", model=agent_model, model_settings=settings())
    must = settings(tool_choice="required", parallel_tool_calls=False)
    first = Agent(name="first", model=agent_model, handoffs=[second], model_settings=must)
    result = loop.run(Runner.run(first, "Hello", max_turns=4))
    assert result.last_agent is second
