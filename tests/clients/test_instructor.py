"""Instructor: objects out of a model, by tools and by JSON schema."""

from typing import Any

import pytest
from capitals import QUESTION, Capital
from openai import OpenAI

instructor: Any = pytest.importorskip("instructor")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA])
def test_an_object_comes_out_at_the_first_try(base_url: str, api_key: str, model_name: str, mode: Any) -> None:
    with OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as openai:
        client = instructor.from_openai(openai, mode=mode)
        fields = {"model": model_name, "messages": QUESTION, "max_retries": 0, "max_tokens": 100}
        capital, completion = client.chat.completions.create_with_completion(response_model=Capital, temperature=0, **fields)
        assert isinstance(capital, Capital) and completion.usage.completion_tokens > 0


def test_a_partial_object_grows(base_url: str, api_key: str, model_name: str) -> None:
    with OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as openai:
        client = instructor.from_openai(openai, mode=instructor.Mode.TOOLS)
        fields = {"model": model_name, "messages": QUESTION, "max_tokens": 100, "temperature": 0}
        partial = list(client.chat.completions.create_partial(response_model=Capital, **fields))
    assert len(partial) > 1 and partial[-1].city is not None and partial[-1].size in ("small", "large")
