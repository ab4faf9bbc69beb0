"""gpt-oss's format through the API: messages on channels in, reasoning, content and calls out, and back through the template."""

import json
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from starlette.testclient import TestClient
from tiny_models import save_tokenizer
from transformers.tokenization_utils_base import AddedToken

from foretoken.engine.grammar_compiler import GrammarCompiler
from foretoken.engine.grammar_spec import GrammarSpec
from foretoken.server.chat_format import ChatPrompt
from foretoken.server.replies import ReplyFormats
from foretoken.server.tools.request import Offer

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>"
    "{% elif m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant to=functions."
    "{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
THOUGHT = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
SPECIAL = ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>", "<|return|>"]


@pytest.fixture
def client(fake: FakeEngine) -> TestClient:
    fake.tokenizer.chat_template = TEMPLATE
    return fake.client()


def ask(client: TestClient, **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]} | fields)
    assert response.status_code == 200, response.text
    return response.json() if not fields.get("stream") else {"events": response.text.split("\n\n")}


def said(client: TestClient, stream: bool, **fields: Any) -> tuple[str, str, str, str]:
    """Reasoning, content, calls with their arguments, and the finish reason."""
    answer = ask(client, stream=stream, **fields)
    if not stream:
        (choice,) = answer["choices"]
        parts = [choice["message"]]
    else:
        choices = [json.loads(event[6:])["choices"][0] for event in answer["events"] if event.startswith("data: {")]
        parts, choice = [choice["delta"] for choice in choices], choices[-1]
    calls = [call["function"] for part in parts for call in part.get("tool_calls", ())]
    reasoning, content = ("".join(part.get(key) or "" for part in parts) for key in ("reasoning_content", "content"))
    return reasoning, content, "".join(call.get("name", "") + call["arguments"] for call in calls), choice["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
def test_channels_become_parts_of_a_message(client: TestClient, fake: FakeEngine, stream: bool) -> None:
    fake.reply = f"{THOUGHT}{FINAL}Two"
    assert said(client, stream) == ("Hm", "Two", "", "stop")
    fake.reply = f'{THOUGHT}{CALL}{{"city": "Rome"}}'
    assert said(client, stream, tools=[TOOL]) == ("Hm", "", 'weather{"city": "Rome"}', "tool_calls")


def test_earlier_thoughts_and_calls_go_back_through_the_template(client: TestClient, fake: FakeEngine) -> None:
    """What was said beside a call, too, which the template takes in one piece only."""
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "First", "reasoning_content": "Hm", "tool_calls": [call]},
        {"role": "tool", "content": "Sun", "tool_call_id": "c"},
    ]
    ask(client, messages=messages, tools=[TOOL])
    prompt = fake.prompt()
    assert prompt.endswith(
        "<|start|>assistant<|channel|>analysis<|message|>Hm\nFirst<|end|><|start|>assistant to=functions.weather<|channel|>commentary json"
        '<|message|>{"city": "Rome"}<|call|><|start|>functions.weather to=assistant<|channel|>commentary<|message|>Sun<|end|>'
        "<|start|>assistant"
    )


@pytest.mark.parametrize(
    ("text", "continued", "allowed"),
    [
        (f'{THOUGHT}{FINAL}{{"a": 1}}', None, True), (f'{FINAL}{{"a": 1}}', None, True), (f'{CALL}{{"city": "Rome"}}', None, True),
        (f'{THOUGHT}{CALL}{{"city": "Rome"}}', None, True), (f"{THOUGHT}{FINAL}Two", None, False), (f'{THOUGHT}{{"a": 1}}', None, False),
        (f'{CALL}{{"city": 1}}', None, False), ('{"a": 1}', None, False), ('{"a": 1}', "", True),
    ],
)
def test_a_form_holds_the_final_channel_alone(tmp_path: Path, text: str, continued: str | None, allowed: bool) -> None:
    tokenizer = save_tokenizer(tmp_path)
    tokenizer.add_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer.chat_template = TEMPLATE
    formats = ReplyFormats(tokenizer, None, None)
    assert formats.describe() == "tool calls as openai; reasoning as openai_gptoss"
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    offer, wanted = Offer((TOOL,)), GrammarSpec.json_schema(schema, param="response_format")
    spec = formats.grammar(wanted, formats.of_tools(offer), offer, ChatPrompt("<|start|>assistant", [], continued))
    assert spec is not None and formats.needs_special_tokens(None)
    tokens, end = list[int](), len(tokenizer) - 1  # <|return|>
    state = GrammarCompiler(tokenizer, len(tokenizer), [end]).compile(spec).open(tokens)
    for token in [*tokenizer.encode(text, add_special_tokens=False), end]:
        mask = state.mask(())
        if mask is None or not mask.allows(token):
            assert not allowed, tokenizer.decode([*tokens, token])
            return
        tokens.append(token)
    assert allowed
