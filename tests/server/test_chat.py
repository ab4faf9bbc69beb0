import threading
from typing import Any

import pytest
from asking import answer, chunks, refusal
from fake_engine import FakeEngine
from starlette.testclient import TestClient

from foretoken.engine.errors import ConfigError
from foretoken.proposers.config import Typical
from foretoken.server import chat_format, replies

ROUTE = "/v1/chat/completions"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


def stream(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    return chunks(client, ROUTE, CHAT | fields)


def test_a_whole_answer(client: TestClient, fake: FakeEngine) -> None:
    body = answer(client, ROUTE, CHAT)
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-") and body["model"] == "tiny"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": fake.reply, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    prompt, usage = fake.calls[0].prompt, body["usage"]
    assert usage["prompt_tokens"] == len(prompt) and usage["total_tokens"] == len(prompt) + usage["completion_tokens"]
    assert usage["completion_tokens"] == len(fake.tokenizer.encode(fake.reply))
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    assert usage["completion_tokens_details"] == {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 1, "reasoning_tokens": 0}
    assert fake.tokenizer.decode(prompt) == "<|user|>Hi<|end|><|assistant|>"


def test_no_message_is_lost_to_a_template_that_reads_parts(fake: FakeEngine) -> None:
    template = "{% for m in messages %}<|{{ m.role }}|>{% for part in m.content %}{{ part.text }}{% endfor %}<|end|>{% endfor %}"
    fake.tokenizer.chat_template = template
    client = fake.client()
    assert client.post(ROUTE, json=CHAT).status_code == 200
    assert fake.prompt(0) == "<|user|>Hi<|end|>"


def test_metrics_are_vllms_shape(client: TestClient) -> None:
    metrics = answer(client, ROUTE, CHAT)["metrics"]
    speculation = metrics.pop("speculative_decoding")
    assert set(metrics) == {"queue_time_ms", "time_to_first_token_ms", "generation_time_ms", "mean_itl_ms", "tokens_per_second"}
    steps = speculation["num_spec_steps"]
    assert speculation == {
        "mean_acceptance_length": pytest.approx(1 + speculation["num_accepted_draft_tokens"] / steps, abs=1e-4),
        "draft_acceptance_rate": pytest.approx(speculation["num_accepted_draft_tokens"] / (2 * steps), abs=1e-4),
        "acceptance_histogram": [0, steps],
        "num_spec_steps": steps,
        "num_draft_tokens": 2 * steps,
        "num_accepted_draft_tokens": speculation["num_accepted_draft_tokens"],
        "num_spec_tokens": 5,
        "lossy": None,
    }


@pytest.mark.parametrize("stream_options", [{}, {"include_usage": True}, {"include_speculation": True}])
def test_a_lossy_rule_is_named_streamed_or_not(fake: FakeEngine, stream_options: dict[str, Any]) -> None:
    fake.typical = Typical()
    client = fake.client()
    assert answer(client, ROUTE, CHAT)["metrics"]["speculative_decoding"]["lossy"] == "typical"
    assert stream(client, stream_options=stream_options)[-1]["metrics"]["speculative_decoding"]["lossy"] == "typical"


def test_a_stream_is_one_chunk_per_step_behind_the_role(client: TestClient, fake: FakeEngine) -> None:
    chunks = stream(client)
    assert {chunk["id"] for chunk in chunks} == {fake.calls[0].id}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    num_tokens = len(fake.tokenizer.encode(fake.reply))
    assert len(chunks) == 1 + (num_tokens + 1) // 2
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == fake.reply
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert chunks[-1]["metrics"]["speculative_decoding"]["num_spec_tokens"] == 5
    assert all("usage" not in chunk for chunk in chunks)


def test_usage_comes_last_when_asked_for(client: TestClient) -> None:
    chunks = stream(client, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == answer(client, ROUTE, CHAT)["usage"]
    assert "speculative_decoding" in chunks[-1]["metrics"]
    assert all(chunk["usage"] is None and "metrics" not in chunk for chunk in chunks[:-1])


def test_usage_in_every_chunk_grows(client: TestClient) -> None:
    chunks = stream(client, stream_options={"include_usage": True, "continuous_usage_stats": True})[1:]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] == 2
    assert all(chunk["usage"]["prompt_tokens_details"] == {"cached_tokens": 3} for chunk in chunks)


def test_speculation_says_who_proposed_each_token(client: TestClient, fake: FakeEngine) -> None:
    chunks = stream(client, stream_options={"include_speculation": True})[1:]
    tokens = fake.tokenizer.encode(fake.reply)
    told = [entry for chunk in chunks for entry in chunk["choices"][0]["speculation"]]
    assert [entry["token_id"] for entry in told] == tokens
    assert [entry["proposer"] for entry in told] == [None if index % 2 == 0 else "ngram" for index in range(len(tokens))]


def test_choices_interleave_and_each_finishes_once(client: TestClient, fake: FakeEngine) -> None:
    chunks = stream(client, n=3)
    for index in range(3):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in own) == fake.reply
        assert sum(choice["finish_reason"] is not None for choice in own) == 1
    assert sum("metrics" in chunk for chunk in chunks) == 1
    body = answer(client, ROUTE, CHAT | {"n": 3})
    one = answer(client, ROUTE, CHAT)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["completion_tokens"] == 3 * one["usage"]["completion_tokens"]
    assert body["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert body["usage"]["prompt_tokens_details"] == one["usage"]["prompt_tokens_details"]
    steps = [choice["speculative_decoding"]["num_spec_steps"] for choice in body["choices"]]
    assert body["metrics"]["speculative_decoding"]["num_spec_steps"] == sum(steps)


def test_logprobs(client: TestClient, fake: FakeEngine) -> None:
    content = answer(client, ROUTE, CHAT | {"logprobs": True, "top_logprobs": 2})["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == fake.reply
    assert all(bytes(entry["bytes"]).decode() == entry["token"] and entry["logprob"] == -0.5 for entry in content)
    assert all([top["logprob"] for top in entry["top_logprobs"]] == [-1.0, -2.0] for entry in content)
    streamed = stream(client, logprobs=True, top_logprobs=2)[1:]
    assert [entry for chunk in streamed for entry in chunk["choices"][0]["logprobs"]["content"]] == content
    assert refusal(client, ROUTE, CHAT | {"top_logprobs": 2})["param"] == "top_logprobs"
    assert client.post(ROUTE, json=CHAT | {"logprobs": True, "top_logprobs": 21}).status_code == 400


@pytest.mark.parametrize("n", [1, 2])
def test_a_failure_on_the_way_is_an_event(client: TestClient, fake: FakeEngine, n: int) -> None:
    fake.fails_after = 2
    events = stream(client, n=n)
    assert events[-1] == {"error": {"message": "not finite", "type": "server_error", "param": None, "code": "numerical_error"}}
    assert all("error" not in event for event in events[:-1]) and fake.num_open == 0
    response = client.post(ROUTE, json=CHAT | {"n": n})
    assert response.status_code == 500 and response.json()["error"]["code"] == "numerical_error"


def test_continuing_a_message_leaves_it_open(client: TestClient, fake: FakeEngine) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The quick"}]
    assert client.post(ROUTE, json={"messages": messages, "continue_final_message": True}).status_code == 200
    assert fake.prompt(0) == "<|user|>Hi<|end|><|assistant|>The quick"
    for fields in ({"messages": messages, "add_generation_prompt": True}, {"messages": messages[:1]}):
        assert refusal(client, ROUTE, {"continue_final_message": True} | fields)["param"] == "continue_final_message"


def test_developer_is_the_system_and_text_parts_are_lines(client: TestClient, fake: FakeEngine) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    client.post(ROUTE, json={"messages": [{"role": "developer", "content": "Be brief"}, {"role": "user", "content": parts}]})
    assert fake.prompt(0) == "<|system|>Be brief<|end|><|user|>a\nb<|end|><|assistant|>"


STRICT = """{%- set turns = messages[1:] if messages[0].role == 'system' and SYSTEM else messages %}
{%- for turn in turns %}{% if (turn.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- endfor %}{% for turn in messages %}{{ turn.role[0] + ':' + turn.content + ';' }}{% endfor %}"""


@pytest.mark.parametrize(
    ("system", "prompt"),
    [
        ("true", "s:be brief\n\nin French;u:one\n\ntwo\n\nnews;a:so;u:ok;"),
        ("false", "u:be brief\n\nin French\n\none\n\ntwo\n\nnews;a:so;u:ok;"),
    ],
)
def test_a_template_that_wants_users_and_answers_by_turns_gets_them(client: TestClient, fake: FakeEngine, system: str, prompt: str) -> None:
    """Coding agents send several messages of one role in a row, and some of the system between them."""
    told = ["system be brief", "developer in French", "user one", "user two", "system news", "assistant so", "user ok"]
    messages = [dict(zip(("role", "content"), line.split(" ", 1), strict=True)) for line in told]
    fake.tokenizer.chat_template = STRICT.replace("SYSTEM", system)
    assert client.post(ROUTE, json={"messages": messages}).status_code == 200
    assert fake.prompt(0) == prompt
    refused = client.post(ROUTE, json={"messages": [*messages[:6], messages[5], messages[6]]})
    assert refused.status_code == 400 and "roles must alternate" in refused.json()["error"]["message"]
    fake.tokenizer.chat_template = STRICT[STRICT.rindex("{% for") :]  # one that takes them gets them as they are
    assert client.post(ROUTE, json={"messages": messages}).status_code == 200
    assert fake.prompt() == "s:be brief;s:in French;u:one;u:two;s:news;a:so;u:ok;"


def test_a_template_may_refuse_but_never_break(client: TestClient, fake: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    for template, said in (
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content.upper() }}", "cannot render"),
        ("{{ 1 // 0 }}", "cannot render"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot render"),
        ("{% for", "cannot render"),
    ):
        fake.tokenizer.chat_template = template
        response = client.post(ROUTE, json=CHAT)
        assert response.status_code == 400 and said in response.json()["error"]["message"], response.text
    fake.tokenizer.chat_template = "fine\n{% if x }"
    with caplog.at_level("ERROR", "foretoken.server"):
        client.post(ROUTE, json=CHAT)
    assert "broken at its line 2" in caplog.text, "whoever runs the server learns where"
    fake.tokenizer.chat_template = None
    assert refusal(client, ROUTE, CHAT)["code"] == "no_chat_template"


@pytest.mark.parametrize(
    "kwargs", [{"tokenize": False}, {"chat_template": "x"}, {"messages": "x"}, {"enable_thinking": []}, {"thinking": "x" * 300}]
)
def test_template_kwargs_come_from_a_list(client: TestClient, kwargs: dict[str, Any]) -> None:
    assert refusal(client, ROUTE, CHAT | {"chat_template_kwargs": kwargs})["param"].startswith("chat_template_kwargs")


def test_template_kwargs_reach_the_template(client: TestClient, fake: FakeEngine) -> None:
    fake.tokenizer.chat_template = "{{ enable_thinking }} {{ reasoning_effort }}"
    fields = {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}
    assert client.post(ROUTE, json=CHAT | fields).status_code == 200
    defaults = fake.client(default_chat_template_kwargs={"enable_thinking": True, "reasoning_effort": "high"})
    assert defaults.post(ROUTE, json=CHAT | {"reasoning_effort": "low"}).status_code == 200
    assert (fake.prompt(0), fake.prompt(1)) == ("False low", "True low")
    with pytest.raises(ConfigError, match="default_chat_template_kwargs takes .* not 'tokenize'"):
        fake.client(default_chat_template_kwargs={"tokenize": False})


def test_long_texts_go_through_a_thread_with_the_same_result(client: TestClient, fake: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    render = fake.tokenizer.apply_chat_template

    def recorded(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread().name)
        return render(*args, **kwargs)

    monkeypatch.setattr(fake.tokenizer, "apply_chat_template", recorded)
    monkeypatch.setattr(chat_format, "OFF_LOOP_CHARS", chat_format.TURN_CHARS + 3)
    prompts = []
    for text in ("fox", "foxy"):
        client.post(ROUTE, json={"messages": [{"role": "user", "content": text}]})
        prompts.append(fake.prompt())
    assert prompts == ["<|user|>fox<|end|><|assistant|>", "<|user|>foxy<|end|><|assistant|>"]
    assert [thread.startswith("foretoken-reader_") for thread in threads] == [False, True]


def test_long_forms_hold_nobody_up(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    monkeypatch.setattr(replies, "reply_grammar", lambda *_: threads.append(threading.current_thread().name))
    for size in (1, 9_000):
        client.post(ROUTE, json=CHAT | {"format": {"title": "x" * size}})
    assert [thread.startswith("asyncio_") for thread in threads] == [False, True]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": "a" * 10**5}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a" * 5000}]}, "messages"),
        ({"max_completion_tokens": 10**5}, "max_completion_tokens"),
        ({"prediction": {"type": "content", "content": "a" * 10**5}}, "prediction"),
    ],
)
def test_what_cannot_fit_is_named(client: TestClient, fields: dict[str, Any], param: str) -> None:
    error = refusal(client, ROUTE, CHAT | fields)
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
