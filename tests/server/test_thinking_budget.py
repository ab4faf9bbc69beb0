"""Budgets of reasoning over HTTP, in every spelling, with and without a form of the answer, under guesses."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from asking import answer, chunks, refusal
from real_app import real_app
from starlette.testclient import TestClient
from tiny_models import CHAT_TEMPLATE
from transformers import AutoTokenizer

ROUTE = "/v1/chat/completions"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200, "temperature": 0, "seed": 1}
SCHEMA = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
THINKS = CHAT_TEMPLATE.replace("<|assistant|>{% endif %}", "<|assistant|>{% if enable_thinking is not defined or enable_thinking %}"
                               "<think>{% else %}<think></think>{% endif %}{% endif %}")


@pytest.fixture(scope="module")
def client(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("reasoner") / "model"
    shutil.copytree(tiny_target, folder)
    (folder / "chat_template.jinja").write_text(THINKS)
    draft = {"method": "draft_model", "model": str(tiny_target), "num_speculative_tokens": 4, "adaptive": False}
    with real_app(folder, draft, {"dtype": "float32"}) as client:
        yield client


def ask(client: TestClient, **fields: Any) -> dict[str, Any]:
    return answer(client, ROUTE, CHAT | fields)


def num_reasoning(body: dict[str, Any]) -> int:
    return body["usage"]["completion_tokens_details"]["reasoning_tokens"]


@pytest.mark.parametrize("budget", [0, 1, 12])
@pytest.mark.parametrize("spelling", ["thinking_token_budget", "reasoning"])
def test_reasoning_ends_and_the_answer_has_its_form(client: TestClient, tiny_target: Path, budget: int, spelling: str) -> None:
    told: dict[str, Any] = {spelling: budget if spelling == "thinking_token_budget" else {"max_tokens": budget}}
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    marker = tokenizer.encode("</think>", add_special_tokens=False)
    for settings in ({}, {"speculation": {"method": "off"}}, {"temperature": 1.0, "n": 2}):
        body = ask(client, response_format=FORM, return_token_ids=True, **told, **settings)
        for choice in body["choices"]:
            assert any(choice["token_ids"][start : start + len(marker)] == marker for start in range(budget, budget + 4))
            assert set(json.loads(choice["message"]["content"])) <= {1, 2} and choice["finish_reason"] == "stop"
            assert bool(choice["message"].get("reasoning")) == (budget > 0)
    plain = ask(client, response_format=FORM, **told, speculation={"method": "off"})
    assert ask(client, response_format=FORM, **told)["choices"] == plain["choices"]


def test_without_a_budget_nothing_ends_it(client: TestClient) -> None:
    for fields in ({}, {"thinking_token_budget": None}, {"thinking_token_budget": -1}, {"reasoning": {}}):
        body = ask(client, max_tokens=60, ignore_eos=True, **fields)
        assert num_reasoning(body) == 60 and body["choices"][0]["message"]["content"] == ""


def test_reasoning_may_be_kept_from_the_client_or_switched_off(client: TestClient) -> None:
    hidden = ask(client, reasoning={"max_tokens": 5, "exclude": True}, max_tokens=30, ignore_eos=True)
    assert "reasoning" not in hidden["choices"][0]["message"] and num_reasoning(hidden) >= 5
    for off in ({"reasoning": {"enabled": False}}, {"reasoning": {"effort": "none"}}, {"reasoning_effort": "none"}):
        body = ask(client, max_tokens=10, ignore_eos=True, **off)
        assert num_reasoning(body) == 0 and body["choices"][0]["message"]["content"]


def test_a_stream_says_the_same(client: TestClient) -> None:
    asked = {"thinking_token_budget": 9, "response_format": FORM, "return_token_ids": True}
    body = ask(client, **asked)
    whole = body["choices"][0]["message"]
    choices = [choice for chunk in chunks(client, ROUTE, CHAT | asked) for choice in chunk["choices"]]
    assert choices[0]["prompt_token_ids"] == body["prompt_token_ids"]
    assert [token for choice in choices for token in choice["token_ids"]] == body["choices"][0]["token_ids"]
    deltas = [choice["delta"] for choice in choices]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == whole["reasoning"]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole["content"]


@pytest.mark.parametrize(
    "fields", [{"thinking_token_budget": -2}, {"thinking_token_budget": "5"}, {"reasoning": {"max_tokens": -1}}, {"reasoning": 1}]
)
def test_what_is_no_budget_is_refused(client: TestClient, fields: dict[str, Any]) -> None:
    assert refusal(client, ROUTE, CHAT | fields)["param"].startswith(next(iter(fields)))
