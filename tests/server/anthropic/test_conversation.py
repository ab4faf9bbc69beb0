"""Anthropic's turns of blocks as the model's template gets them."""

from typing import Any

import pytest
from fake_engine import FakeEngine
from starlette.testclient import TestClient

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning %}~{{ m.reasoning }}~{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{% if m.tool_call_id %}={{ m.tool_call_id }},{{ m.name }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALL = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Köln"}}


@pytest.fixture
def client(fake: FakeEngine) -> TestClient:
    fake.tokenizer.chat_template = TEMPLATE
    return fake.client()


def post(client: TestClient, messages: list[dict[str, Any]], **fields: Any) -> Any:
    return client.post("/v1/messages", json={"max_tokens": 9, "messages": messages} | fields)


def prompt(client: TestClient, fake: FakeEngine, messages: list[dict[str, Any]], **fields: Any) -> str:
    answer = post(client, messages, **fields)
    assert answer.status_code == 200, answer.text
    return fake.prompt()


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def result(said: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "a", "content": said} | more


def test_texts_and_blocks_are_the_same(client: TestClient, fake: FakeEngine) -> None:
    expected = "<|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"
    assert prompt(client, fake, [{"role": "user", "content": "Hi"}], system="Be brief.") == expected
    assert prompt(client, fake, [user(text("Hi"))], system=[text("Be brief.")]) == expected
    assert prompt(client, fake, [{"role": "system", "content": "Be brief."}, user(text("Hi"))]) == expected


def test_turns_of_one_role_in_a_row_are_one(client: TestClient, fake: FakeEngine) -> None:
    turns = [user(text("a"), text("b")), user(text("c")), assistant(text("d")), assistant(text("e")), user(text("f"))]
    assert prompt(client, fake, turns) == "<|user|>a\nb\nc<|end|><|assistant|>d\ne<|end|><|user|>f<|end|><|assistant|>"


def test_calls_and_results(client: TestClient, fake: FakeEngine) -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    turns = [
        user(text("Hi")),
        assistant(thought, {"type": "redacted_thinking", "data": "x"}, text("Let me see."), CALL, CALL | {"id": "b", "input": {}}),
        user(text("Go on."), result([text("rain"), text("wind")]), result("no such place", tool_use_id="b", is_error=True)),
    ]
    assert prompt(client, fake, turns) == (
        '<|user|>Hi<|end|><|assistant|>~hm~Let me see.[a weather {"city": "Köln"}][b weather {}]<|end|>'
        "<|tool|>rain\nwind=a,weather<|end|><|tool|>Error: no such place=b,weather<|end|><|user|>Go on.<|end|><|assistant|>"
    )
    assert prompt(client, fake, [user(text("Hi")), assistant(CALL), user(result(None))]).endswith("<|tool|>=a,weather<|end|><|assistant|>")


def test_a_last_message_of_the_assistant_is_gone_on_with(client: TestClient, fake: FakeEngine) -> None:
    assert prompt(client, fake, [user(text("Hi")), assistant(text("The answer is ("))]) == "<|user|>Hi<|end|><|assistant|>The answer is ("


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([user({"type": "image", "source": {"type": "url", "url": "http://x"}})], "reads text only: a block of the type 'image'"),
        ([user({"type": "document", "source": {}})], "'document'"),
        ([assistant(CALL), user(result([{"type": "image", "source": {}}]))], "'image'"),
        ([user(CALL)], "'tool_use' cannot stand here; use text or tool_result"),
        ([assistant(result("x"))], "'tool_result'"),
        ([user(text("Hi")), assistant(CALL)], "send their results"),
        ([user(result("x"))], "no tool_use block before it has"),
        ([user()], "no content"),
        ([assistant(*[CALL | {"id": str(i)} for i in range(129)]), user(text("x"))], "129 tool_use blocks"),
        ([{"role": "tool", "content": "x"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content: Field required"),
        ([{"role": "user", "content": 7}], "messages.0.content"),
        ([user("Hi")], "messages.0.content.0"),
        ([user({"type": "text"})], "messages.0.content.0.text.text: Field required"),
        ([user({"text": "x"})], "messages.0.content.0"),
        ([assistant(CALL | {"input": "{}"}), user(result("x"))], "input"),
        (["Hi"], "messages.0"),
    ],
)
def test_what_cannot_be_read_is_refused(client: TestClient, messages: list[Any], says: str) -> None:
    answer = post(client, messages)
    assert answer.status_code == 400 and says in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize("system", [7, [7], [{"type": "image"}], [{"type": "text"}]])
def test_a_system_prompt_is_text(client: TestClient, system: object) -> None:
    answer = post(client, [user(text("Hi"))], system=system)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
