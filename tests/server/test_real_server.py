"""The real process on a tiny model, asked by the real openai client."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families
from running_server import RunningServer, start_server

LONG = 400
SLOWLY = {"max_tokens": LONG, "ignore_eos": True, "presence_penalty": 0.1}  # with penalties every token is a step of its own
SPECULATION = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3, "adaptive": false}'


@pytest.fixture(scope="module")
def server(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("real-server") / "log"
    running = start_server([str(tiny_target), "--served-model-name", "tiny", "--speculative-config", SPECULATION], log)
    yield running
    assert running.stop() == 0
    assert "Traceback" not in running.log


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def chat(client: OpenAI, **fields: Any) -> Any:
    """A greedy answer that goes on to its last token."""
    settings = {"model": "tiny", "messages": [{"role": "user", "content": "one two one two"}], "temperature": 0, "max_tokens": 24}
    extra = {"ignore_eos": True} | fields.pop("extra_body", {})
    return client.chat.completions.create(**(settings | fields), extra_body=extra)


def metrics(server: RunningServer) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(httpx.get(server.url + "/metrics").text)
    drop = ("model_name", "engine")
    return {
        (sample.name, *(value for key, value in sample.labels.items() if key not in drop)): sample.value
        for family in families
        for sample in family.samples
    }


def settled(server: RunningServer, timeout_s: float = 60.0) -> dict[tuple[str, ...], float]:
    """The metrics once nothing runs, waits or holds cache."""
    deadline = time.monotonic() + timeout_s
    gauges = [("vllm:num_requests_running",), ("vllm:num_requests_waiting",), ("vllm:kv_cache_usage_perc",)]
    while any((now := metrics(server))[gauge] for gauge in gauges):
        assert time.monotonic() < deadline, {gauge: now[gauge] for gauge in gauges}
        time.sleep(0.02)
    return now



def test_a_stream_says_what_the_whole_answer_says(client: OpenAI) -> None:
    whole = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content and whole.choices[0].finish_reason == "length"
    assert len({chunk.id for chunk in chunks}) == 1
    assert whole.usage.completion_tokens == 24 and chunks[-1].usage.completion_tokens == 24
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_speculation_changes_nothing_but_is_told(client: OpenAI) -> None:
    plain = chat(client, extra_body={"speculation": {"method": "off"}})
    fast = chat(client, extra_body={"prediction": {"type": "content", "content": plain.choices[0].message.content}})
    assert plain.choices[0].message.content == fast.choices[0].message.content
    assert plain.metrics["speculative_decoding"]["num_draft_tokens"] == 0
    told = fast.metrics["speculative_decoding"]
    assert told["num_spec_tokens"] == 4 and sum(told["acceptance_histogram"]) == told["num_spec_steps"]
    assert told["num_accepted_draft_tokens"] == sum(j * steps for j, steps in enumerate(told["acceptance_histogram"]))
    assert fast.metrics["time_to_first_token_ms"] > 0 and fast.metrics["tokens_per_second"] > 0


def test_who_proposed_each_token_covers_the_output(client: OpenAI) -> None:
    content = chat(client).choices[0].message.content
    prediction = {"type": "content", "content": content}
    chunks = list(chat(client, stream=True, stream_options={"include_speculation": True}, extra_body={"prediction": prediction}))
    told = [entry for chunk in chunks for choice in chunk.choices for entry in (choice.model_extra or {}).get("speculation", [])]
    assert len(told) == 24
    final = chunks[-1].model_extra["metrics"]["speculative_decoding"]
    assert sum(entry["proposer"] is not None for entry in told) <= final["num_accepted_draft_tokens"]
    assert {entry["proposer"] for entry in told} <= {None, "ngram", "prediction"}


def test_completions_of_texts_and_token_ids(client: OpenAI, server: RunningServer) -> None:
    text = "def add(a, b):"
    tokens = httpx.post(server.url + "/tokenize", json={"prompt": text}).json()["tokens"]
    settings: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}
    answer = client.completions.create(prompt=[text, text], n=2, **settings)
    alone = client.completions.create(prompt=tokens, **settings)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert {choice.text for choice in answer.choices} == {alone.choices[0].text}
    assert answer.usage and answer.usage.prompt_tokens == 2 * len(tokens) and answer.usage.completion_tokens == 48
    assert client.completions.create(prompt=text, echo=True, **settings).choices[0].text == text + alone.choices[0].text
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(prompt=text, stream=True, **settings))
    assert streamed == alone.choices[0].text


def test_seeded_choices_differ_from_each_other_and_repeat(client: OpenAI) -> None:
    first, second = (chat(client, n=3, temperature=1.0, seed=5) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices] and len(set(texts)) == 3
    by_index = {0: "", 1: "", 2: ""}
    for chunk in chat(client, n=3, temperature=1.0, seed=5, stream=True):
        by_index[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(by_index.values()) == texts


def test_a_stop_string_ends_the_text_before_it(client: OpenAI) -> None:
    text = chat(client).choices[0].message.content
    stop = text[len(text) // 2 :][:3]
    for stream in (False, True):
        answer = chat(client, stop=[stop], stream=stream)
        if stream:
            chunks = list(answer)
            said, reason = "".join(chunk.choices[0].delta.content or "" for chunk in chunks), chunks[-1].choices[0].finish_reason
        else:
            said, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
        assert said == text[: text.index(stop)] and reason == "stop"


def test_logprobs_of_both_routes_agree(client: OpenAI, server: RunningServer) -> None:
    content = chat(client, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert len(content) == 24
    for entry in content:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token and entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)
    streamed = [
        entry
        for chunk in chat(client, logprobs=True, top_logprobs=3, stream=True)
        for entry in (chunk.choices[0].logprobs or _NONE).content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]
    messages = [{"role": "user", "content": "one two one two"}]
    prompt = httpx.post(server.url + "/tokenize", json={"messages": messages}).json()["tokens"]
    legacy = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=24, temperature=0, logprobs=3, extra_body={"ignore_eos": True}
    )
    logprobs = legacy.choices[0].logprobs
    assert logprobs and logprobs.tokens == [entry.token for entry in content]
    assert logprobs.token_logprobs == pytest.approx([entry.logprob for entry in content], abs=1e-4)


class _NONE:
    content: list[Any] = []


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"model": "gpt-5"}, openai.NotFoundError, "model"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "max_tokens"),
        ({"logit_bias": {"300": 1}}, openai.BadRequestError, "logit_bias"),
        ({"extra_body": {"allowed_token_ids": [2**31]}}, openai.BadRequestError, "allowed_token_ids"),
        ({"extra_body": {"stop_token_ids": [-1]}}, openai.BadRequestError, "stop_token_ids"),
        ({"extra_body": {"min_tokens": 10**6}, "max_tokens": None}, openai.BadRequestError, "min_tokens"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError, "tools"),
        ({"messages": [{"role": "user", "content": "word " * 600}]}, openai.BadRequestError, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_mistakes_are_the_clients_exceptions(
    client: OpenAI, server: RunningServer, fields: dict[str, Any], kind: type[openai.APIStatusError], param: str | None, stream: bool
) -> None:
    with pytest.raises(kind) as caught:
        chat(client, stream=stream, **json.loads(json.dumps(fields)))
    assert caught.value.request_id and isinstance(caught.value.body, dict)
    if param:
        assert caught.value.body["param"] == param
    else:
        assert caught.value.body["code"] == "context_length_exceeded"
    assert httpx.get(server.url + "/health").status_code == 200


def test_a_request_is_one_line_of_its_log(server: RunningServer) -> None:
    """What is in the line is tested in test_logs.py."""
    before = len(server.log)
    answer = server.complete("one two one two", max_tokens=24, ignore_eos=True)
    httpx.get(server.url + "/nothing-of-this-name")

    def written() -> list[str]:
        return [line for line in server.log[before:].splitlines() if str(answer["id"]) in line or "route=other" in line]

    deadline = time.monotonic() + 60
    while len(written()) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    mine, other = sorted(written(), key=lambda line: "route=other" in line)
    assert "route=other" in other and "nothing-of-this-name" not in server.log and "GET /health" not in server.log
    told = dict(pair.split("=", 1) for pair in mine.partition("foretoken.request: ")[2].split())
    assert told["id"] == answer["id"] and told["route"] == "/v1/completions" and told["output_tokens"] == "24" and told["status"] == "200"
    assert int(told["accepted"]) <= int(told["drafted"]) and float(told["ttft_ms"]) <= float(told["e2e_ms"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_blocks(client: OpenAI, server: RunningServer, stream: bool) -> None:
    before = settled(server)
    generated = before["vllm:generation_tokens_total",]
    body = {"model": "tiny", "prompt": "one two", "n": 4, "temperature": 0, "stream": stream} | SLOWLY
    with httpx.Client(base_url=server.url, timeout=0.05 if not stream else 30) as impatient:
        if stream:
            with impatient.stream("POST", "/v1/completions", json=body) as answer:
                next(answer.iter_raw())
        else:
            with pytest.raises(httpx.ReadTimeout):
                impatient.post("/v1/completions", json=body)
    aborted = "vllm:request_success_total", "abort"
    deadline = time.monotonic() + 60
    while (after := settled(server))[aborted] == before[aborted]:  # it may not have begun with what the client has left
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert after["vllm:generation_tokens_total",] - generated < 4 * LONG


def test_32_streams_at_once_all_end_well(client: OpenAI, server: RunningServer) -> None:
    before = settled(server)

    def run(seed: int) -> tuple[str, str | None]:
        chunks = list(chat(client, stream=True, seed=seed, temperature=1.0, max_tokens=16))
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks), chunks[-1].choices[0].finish_reason

    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(run, range(32)))
    assert {reason for _, reason in answers} == {"length"}
    assert len({text for text, _ in answers}) > 16
    assert run(7) == answers[7]  # the same seed alone and in a crowd
    after = settled(server)
    assert after["vllm:generation_tokens_total",] - before["vllm:generation_tokens_total",] == 33 * 16
    assert after["vllm:request_success_total", "length"] - before["vllm:request_success_total", "length"] == 33
    assert after["vllm:time_to_first_token_seconds_count",] - before["vllm:time_to_first_token_seconds_count",] == 33


def test_speculation_is_counted(client: OpenAI, server: RunningServer) -> None:
    before = settled(server)
    content = chat(client).choices[0].message.content
    told = chat(client, extra_body={"prediction": {"type": "content", "content": content}}).metrics["speculative_decoding"]
    after = settled(server)

    def grown(*name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown("vllm:spec_decode_num_draft_tokens_total") >= told["num_draft_tokens"] > 0
    assert grown("vllm:spec_decode_num_accepted_tokens_total") >= told["num_accepted_draft_tokens"] > 0
    by_position = [name for name in after if name[0] == "vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    assert sum(grown(*name) for name in by_position) == grown("vllm:spec_decode_num_accepted_tokens_total")
    assert 0 < after["vllm:spec_decode_acceptance_rate",] <= 1


def test_raw_requests_never_break_it(server: RunningServer) -> None:
    headers = {"Content-Type": "application/json"}
    for body in (b"", b"null", b"{", b'{"prompt":' + b"[" * 100_000, b'{"prompt":"\\ud800"}', b'{"prompt":"a","temperature":NaN}'):
        answer = httpx.post(server.url + "/v1/completions", content=body, headers=headers)
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error", body[:40]
    chunks = iter([b'{"prompt":"', *[b"a" * 2**20] * 5])
    answer = httpx.post(server.url + "/v1/completions", content=chunks, headers=headers)
    assert answer.status_code == 413
    with closing(HTTPConnection(server.url.removeprefix("http://"))) as patient:  # sends all before it reads, as many clients do
        for size, status in ((20 * 2**20, 413), (5, 400)):
            patient.request("POST", "/v1/completions", body=b" " * size, headers=headers)
            answered = patient.getresponse()
            assert answered.status == status and json.loads(answered.read())["error"]



def test_the_drain_has_an_end(server_process: Callable[..., RunningServer], tiny_target: Path) -> None:
    """Requests that outlast the drain are told so, in the stream."""
    running = server_process(tiny_target, "--drain-timeout", "0")
    body = {"prompt": "one two", "n": 8, "temperature": 1, "seed": 1, "stream": True} | SLOWLY
    with running.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        running.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "server_shutdown"
    assert running.process.wait(20) == 0
