"""LangChain's ChatOpenAI, by LangChain's own standard suite for chat models."""

from typing import Any

import httpx
import openai
import pytest
from running_server import RunningServer

ChatOpenAI: Any = pytest.importorskip("langchain_openai").ChatOpenAI
suite: Any = pytest.importorskip("langchain_tests.integration_tests")

# One event loop for all: LangChain keeps its connections from one model to the next.
pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

WRONG_ANSWER = (AssertionError, ValueError)  # what a refusal of the server does not raise
CLOSING = ('"', '",', '"}', '"\n', '."', '?"', '!"')


@pytest.fixture(scope="module")
def push(server: RunningServer, api_key: str) -> dict[str, int]:
    """Towards closing quotes: a model as small as the embedded one finds no end within a string that may be of any length."""
    headers = {"Authorization": f"Bearer {api_key}"}
    spelled = [httpx.post(server.url + "/tokenize", json={"prompt": text}, headers=headers).json()["tokens"] for text in CLOSING]
    return {str(tokens[0]): 6 for tokens in spelled if len(tokens) == 1}


class TestChatOpenAI(suite.ChatModelIntegrationTests):
    """Pictures, sound and documents are off: the server reads text."""

    settings: dict[str, Any] = {}  # known once the server runs

    @property
    def chat_model_class(self) -> Any:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return self.settings

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "json_schema", "strict": True}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @pytest.fixture
    def model(self, request: pytest.FixtureRequest, openai_environment: str, push: dict[str, int]) -> Any:
        bounded = {"temperature": 0, "max_completion_tokens": 512, "logit_bias": push}
        self.settings = {"model": openai_environment, "stream_usage": True} | bounded
        return ChatOpenAI(**(self.standard_chat_model_params | self.settings | getattr(request, "param", {})))

    @pytest.mark.xfail(
        reason="the embedded model does not heed which keys a prompt asks for, and goes on inventing more",
        raises=(*WRONG_ANSWER, openai.LengthFinishReasonError),
    )
    def test_json_mode(self, model: Any) -> None:
        super().test_json_mode(model)

    @pytest.mark.xfail(reason="the embedded model does not repeat the Chinese name it was given", raises=WRONG_ANSWER)
    def test_unicode_tool_call_integration(self, model: Any, **settings: Any) -> None:
        super().test_unicode_tool_call_integration(model, **settings)
