"""LiteLLM: our server as one of its `hosted_vllm` and `openai` providers, and behind its names for errors."""

import asyncio
from typing import Any

import pytest

litellm: Any = pytest.importorskip("litellm")

pytestmark = pytest.mark.slow


@pytest.fixture
def fields(base_url: str, api_key: str) -> dict[str, Any]:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    return {"api_base": base_url, "api_key": api_key, "messages": question, "temperature": 0, "max_tokens": 24, "num_retries": 0}


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_completion_and_its_stream_agree(fields: dict[str, Any], model_name: str, provider: str) -> None:
    name = f"{provider}/{model_name}"
    whole: Any = litellm.completion(name, **fields)
    chunks: Any = list(litellm.completion(name, **fields, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    rebuilt: Any = litellm.stream_chunk_builder(chunks)
    assert rebuilt.choices[0].message.content == text and rebuilt.usage.completion_tokens == whole.usage.completion_tokens


def test_vllm_parameters_go_through(fields: dict[str, Any], model_name: str) -> None:
    answer: Any = litellm.completion(f"hosted_vllm/{model_name}", **fields, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    assert answer.choices[0].message.content in ("yes", "no")


def test_text_completion(fields: dict[str, Any], model_name: str) -> None:
    prompt = {key: value for key, value in fields.items() if key != "messages"}
    answer: Any = litellm.text_completion(model=f"text-completion-openai/{model_name}", prompt="The sky is", **prompt)
    assert answer.choices[0].text


def test_many_at_once(fields: dict[str, Any], model_name: str) -> None:
    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(litellm.acompletion(f"hosted_vllm/{model_name}", **fields) for _ in range(8)))

    assert len({answer.choices[0].message.content for answer in asyncio.run(all_of_them())}) == 1


def test_errors_have_their_classes(fields: dict[str, Any], model_name: str) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(f"hosted_vllm/{model_name}", **(fields | {"temperature": -1}))
    with pytest.raises(litellm.NotFoundError, match="does not exist"):
        litellm.completion("hosted_vllm/gpt-9", **fields)
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(f"hosted_vllm/{model_name}", **(fields | {"api_key": "wrong"}))
    with pytest.raises(litellm.ContextWindowExceededError):  # what its fallbacks, and the agents built on it, wait for
        litellm.completion(f"hosted_vllm/{model_name}", **(fields | {"messages": [{"role": "user", "content": "word " * 3000}]}))
