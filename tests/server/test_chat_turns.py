"""Conversations with calls and results, as agents send them, by templates that are particular about them."""

from typing import Any

import pytest
from asking import answer
from fake_engine import FakeEngine
from starlette.testclient import TestClient

LLAMA = """{% for m in messages %}{% if m.tool_calls %}
{%- if not m.tool_calls|length == 1 %}{{ raise_exception('only single tool-calls') }}{% endif %}
{%- endif %}{{ m.role[0] + ':' + m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %};{% endfor %}"""
MISTRAL = """{% for m in messages if m.role != 'tool' and not m.tool_calls %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}
{%- for m in messages %}{{ m.role[0] + ':' + m.content }}
{%- for id in (m.tool_calls or []) | map(attribute='id') | list + ([m.tool_call_id] if m.tool_call_id else []) %}={{ id }}
{%- if id|length != 9 %}{{ raise_exception('ids have a length of 9') }}{% endif %}{% endfor %};{% endfor %}"""


def call(id: str, name: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}}


def result(id: str, content: str) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": id, "content": content}


USER = {"role": "user", "content": "hi"}
TWO = {"role": "assistant", "content": "so", "tool_calls": [call("1", "f"), call("2", "g")]}


@pytest.fixture
def prompt_of(client: TestClient, fake: FakeEngine) -> Any:
    def prompt(template: str, *messages: Any) -> str:
        fake.tokenizer.chat_template = template
        answer(client, "/v1/chat/completions", {"messages": [USER, *messages]})
        return fake.prompt()

    return prompt


def test_calls_made_at_once_are_told_one_by_one_where_a_template_takes_one(prompt_of: Any) -> None:
    answered = [TWO, result("2", "b"), result("1", "a"), USER]
    assert prompt_of(LLAMA, *answered) == "u:hi;a:so[f];t:a;a:[g];t:b;u:hi;"
    assert prompt_of(LLAMA, TWO, result("1", "a"), result("?", "?")) == "u:hi;a:so[f];t:a;a:[g];t:?;"
    several = LLAMA.replace("== 1", "<= 2")
    assert prompt_of(several, *answered) == "u:hi;a:so[f][g];t:b;t:a;u:hi;", "one that takes them gets them as they are"


def test_a_template_that_wants_an_answer_behind_results_gets_what_was_said_with_them(prompt_of: Any) -> None:
    """Claude Code's messages have results and texts in one."""
    one = {"role": "assistant", "tool_calls": [call("abcdefgh1", "f")]}
    told = prompt_of(MISTRAL, one, result("abcdefgh1", "a"), USER, {"role": "assistant", "content": "ok"}, USER)
    assert told == "u:hi;a:=abcdefgh1;t:a\n\nhi=abcdefgh1;a:ok;u:hi;"


def test_ids_of_other_servers_become_such_as_a_template_takes(prompt_of: Any) -> None:
    told = prompt_of(MISTRAL, {"role": "assistant", "tool_calls": [call("call_1", "f"), call("call_2", "g")]}, result("call_2", "b"))
    _, calls, results, _ = told.split(";")
    _, first, second = calls.split("=")
    assert len(first) == len(second) == 9 and first != second and (first + second).isalnum() and results == f"t:b={second}"


def test_results_bear_the_names_of_their_functions(prompt_of: Any) -> None:
    named = "{% for m in messages if m.role == 'tool' %}{{ m.name }}:{{ m.content }};{% endfor %}"
    assert prompt_of(named, TWO, result("2", "b"), result("1", "a") | {"name": "own"}) == "g:b;own:a;"
