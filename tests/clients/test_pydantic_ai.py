"""Pydantic AI: an agent with typed output and a tool that it must call, plain and streamed."""

import asyncio
from typing import Any, Literal

import pytest
from capitals import ASKED, Capital

pydantic_ai: Any = pytest.importorskip("pydantic_ai")
OpenAIChatModel: Any = pytest.importorskip("pydantic_ai.models.openai").OpenAIChatModel
OpenAIProvider: Any = pytest.importorskip("pydantic_ai.providers.openai").OpenAIProvider

Agent, NativeOutput, Tool, ToolOutput = pydantic_ai.Agent, pydantic_ai.NativeOutput, pydantic_ai.Tool, pydantic_ai.ToolOutput
pytestmark = pytest.mark.slow


@pytest.fixture
def chat_model(base_url: str, api_key: str, model_name: str) -> Any:
    settings: Any = {"temperature": 0, "max_tokens": 100}
    return OpenAIChatModel(model_name, provider=OpenAIProvider(base_url=base_url, api_key=api_key), settings=settings)


@pytest.mark.parametrize("way", [ToolOutput, NativeOutput])
def test_typed_output(chat_model: Any, way: Any) -> None:
    agent = Agent(chat_model, output_type=way(Capital), retries=0)
    result = agent.run_sync(ASKED)
    assert isinstance(result.output, Capital) and result.usage.output_tokens > 0


def test_text_and_its_stream_agree(chat_model: Any) -> None:
    agent = Agent(chat_model, instructions="Answer in one sentence.")

    async def both() -> tuple[str, str]:
        whole = await agent.run(ASKED)
        async with agent.run_stream(ASKED) as stream:
            pieces = [piece async for piece in stream.stream_text(delta=True)]
        return whole.output, "".join(pieces)

    whole, streamed = asyncio.run(both())
    assert whole and streamed == whole


def test_a_tool_is_called_and_its_result_goes_back(chat_model: Any) -> None:
    """An output that is a tool makes a call necessary: of the function, which is there once, or of the output itself."""
    asked: list[str] = []

    def weather(city: Literal["Paris", "Rome"]) -> str:
        asked.append(city)
        return "It is sunny."

    async def once(context: Any, tool: Any) -> Any:
        return None if asked else tool

    agent = Agent(chat_model, output_type=ToolOutput(Capital), tools=[Tool(weather, prepare=once)], retries=0)
    result = agent.run_sync("What is the weather in Paris?")
    assert isinstance(result.output, Capital) and set(asked) <= {"Paris", "Rome"}
