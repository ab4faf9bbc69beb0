"""OpenAI's Python client, 2.x or 3.x, whichever is installed: all that it adds to bare HTTP."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from capitals import QUESTION, Capital
from openai import (
    APIError,
    AsyncOpenAI,
    AuthenticationError,
    BadRequestError,
    InternalServerError,
    LengthFinishReasonError,
    NotFoundError,
    OpenAI,
    pydantic_function_tool,
)
from running_server import RunningServer


@pytest.fixture(scope="module")
def client(base_url: str, api_key: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=120) as client:
        yield client


def fields(model_name: str, **more: Any) -> dict[str, Any]:
    return {"model": model_name, "messages": QUESTION, "temperature": 0, "max_tokens": 24} | more


def test_models(client: OpenAI, model_name: str) -> None:
    assert [card.id for card in client.models.list()] == [model_name]
    assert client.models.retrieve(model_name).object == "model"


def test_chat_plain_streamed_and_asynchronous_agree(client: OpenAI, model_name: str, base_url: str, api_key: str) -> None:
    whole = client.chat.completions.create(**fields(model_name)).choices[0].message.content
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**fields(model_name), stream=True))

    async def asynchronous() -> list[str]:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:

            async def one() -> str:
                stream = await client.chat.completions.create(**fields(model_name), stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return list(await asyncio.gather(*(one() for _ in range(8))))

    assert whole and streamed == whole and set(asyncio.run(asynchronous())) == {whole}


def test_the_streaming_helper_gathers_the_same_completion(client: OpenAI, model_name: str) -> None:
    more: Any = fields(model_name, logprobs=True, top_logprobs=2, stream_options={"include_usage": True})
    kinds: list[str] = []
    with client.chat.completions.stream(**more) as stream:
        for event in stream:
            kinds.append(event.type)
        final = stream.get_final_completion()
    whole = client.chat.completions.create(**fields(model_name, logprobs=True, top_logprobs=2))
    assert final.choices[0].message.content == whole.choices[0].message.content
    told, expected = final.choices[0].logprobs, whole.choices[0].logprobs
    assert told is not None and expected is not None
    assert [said.token for said in told.content or ()] == [said.token for said in expected.content or ()]
    assert final.usage is not None and whole.usage is not None and final.usage.completion_tokens == whole.usage.completion_tokens
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta", "logprobs.content.done"} <= set(kinds)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_parse_returns_the_object(client: OpenAI, model_name: str, temperature: float) -> None:
    parsed = client.chat.completions.parse(**fields(model_name, max_tokens=200, temperature=temperature, seed=1), response_format=Capital)
    assert isinstance(parsed.choices[0].message.parsed, Capital)


def test_parse_of_an_answer_that_was_cut_off(client: OpenAI, model_name: str) -> None:
    with pytest.raises(LengthFinishReasonError):
        client.chat.completions.parse(**fields(model_name, max_tokens=3), response_format=Capital)


def test_the_streaming_helper_parses(client: OpenAI, model_name: str) -> None:
    with client.chat.completions.stream(**fields(model_name, max_tokens=200), response_format=Capital) as stream:
        partial = [event.parsed for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Capital)
    assert partial[-1] == final.choices[0].message.parsed.model_dump()


def test_tools_are_parsed_plain_and_streamed(client: OpenAI, model_name: str) -> None:
    must = {"tools": [pydantic_function_tool(Capital)], "tool_choice": "required", "parallel_tool_calls": False}
    more: Any = fields(model_name, max_tokens=200, **must)
    (whole,) = list(client.chat.completions.parse(**more).choices[0].message.tool_calls or ())
    with client.chat.completions.stream(**more) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        (streamed,) = list(stream.get_final_completion().choices[0].message.tool_calls or ())
    assert isinstance(whole.function.parsed_arguments, Capital)
    assert streamed.function.parsed_arguments == whole.function.parsed_arguments == done[0].parsed_arguments
    assert done[0].name == "Capital"


def test_a_tool_is_run_and_its_result_goes_back(client: OpenAI, model_name: str) -> None:
    more: Any = fields(model_name, max_tokens=200, tools=[pydantic_function_tool(Capital)])
    asked = client.chat.completions.create(**(more | {"tool_choice": "required", "parallel_tool_calls": False})).choices[0].message
    assert asked.tool_calls
    result = {"role": "tool", "tool_call_id": asked.tool_calls[0].id, "content": "Paris is large."}
    messages = [*QUESTION, asked.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(**(more | {"messages": messages, "tool_choice": "none"}))
    assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls


def test_completions_with_logprobs_and_several_prompts(client: OpenAI, model_name: str) -> None:
    more: Any = {"model": model_name, "prompt": ["The sky is", "Water is"], "temperature": 0, "max_tokens": 8, "n": 2, "logprobs": 3}
    answer = client.completions.create(**more)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice in answer.choices:
        assert choice.logprobs is not None and "".join(choice.logprobs.tokens or ()) == choice.text
    texts = [""] * 4
    for chunk in client.completions.create(**more, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in answer.choices]


def test_embeddings(client: OpenAI, model_name: str) -> None:
    """The client asks for base64 by itself."""
    texts = ["one", "two"]
    decoded = client.embeddings.create(model=model_name, input=texts)
    plain = client.embeddings.create(model=model_name, input=texts, encoding_format="float")
    for one, other in zip(decoded.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-3) and len(one.embedding) > 0


def test_raw_responses_and_streamed_responses_show_their_headers(client: OpenAI, model_name: str) -> None:
    raw = client.chat.completions.with_raw_response.create(**fields(model_name), extra_headers={"x-request-id": "mine-1"})
    assert raw.headers["x-request-id"] == "mine-1" and raw.headers["content-type"] == "application/json"
    assert raw.parse().choices[0].message.content
    assert raw.parse()._request_id == "mine-1"
    with client.chat.completions.with_streaming_response.create(**fields(model_name), stream=True) as streamed:
        assert streamed.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in streamed.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


def test_errors_have_their_classes(client: OpenAI, base_url: str, model_name: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        client.chat.completions.create(**fields(model_name, temperature=-1))
    assert refused.value.param == "temperature" and refused.value.type == "invalid_request_error" and refused.value.request_id
    with pytest.raises(NotFoundError) as unknown:
        client.chat.completions.create(**fields("gpt-9"))
    assert unknown.value.code == "model_not_found" and model_name in unknown.value.message
    with OpenAI(base_url=base_url, api_key="wrong", max_retries=0) as stranger, pytest.raises(AuthenticationError):
        stranger.models.list()


def test_a_stream_that_is_closed_early_frees_its_request(client: OpenAI, model_name: str, server: RunningServer) -> None:
    stream = client.chat.completions.create(**fields(model_name, max_tokens=1500), stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    for _ in range(100):
        lines = httpx.get(server.url + "/metrics").text.splitlines()
        if all(line.endswith(" 0.0") for line in lines if line.startswith("vllm:num_requests_running{")):
            return
        threading.Event().wait(0.05)
    raise AssertionError("the request still runs")


@pytest.fixture
def crowded(server: RunningServer) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A door before the server that turns the first two requests away, once as we do with a full queue and once with a 429."""
    turned_away: list[dict[str, Any]] = []

    class Door(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if len(turned_away) < 2:
                turned_away.append(dict(self.headers))
                status = (503, 429)[len(turned_away) - 1]
                self._answer(status, b'{"error": {"message": "full", "type": "x", "param": null, "code": null}}', {"retry-after": "1"})
            else:
                headers = {name: self.headers[name] for name in ("authorization", "content-type")}
                answer = httpx.post(server.url + self.path, content=body, headers=headers, timeout=120)
                self._answer(answer.status_code, answer.content, {})

        def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in ({"content-type": "application/json", "content-length": str(len(body))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Door) as door:
        thread = threading.Thread(target=door.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{door.server_port}/v1", turned_away
        door.shutdown()
        thread.join()


def test_a_full_queue_is_tried_again(crowded: tuple[str, list[dict[str, Any]]], api_key: str, model_name: str) -> None:
    url, turned_away = crowded
    with OpenAI(base_url=url, api_key=api_key, max_retries=3) as client:
        assert client.chat.completions.create(**fields(model_name)).choices[0].message.content
    assert len(turned_away) == 2


@pytest.mark.slow
def test_our_own_full_queue_says_when_to_come_back(server_process: Any, api_key: str) -> None:
    """More requests than the queue takes: without retries some are refused, with them all are answered."""
    small = server_process("--api-key", api_key, "--max-queued-requests", "1", "--max-num-seqs", "1")
    model_name = "foretoken-demo"
    with OpenAI(base_url=small.url + "/v1", api_key=api_key, max_retries=0) as client:

        def ask(patient: bool) -> str | InternalServerError:
            try:
                asking = client.with_options(max_retries=10) if patient else client
                more: Any = fields(model_name, max_tokens=200, extra_body={"ignore_eos": True})
                return asking.chat.completions.create(**more).choices[0].message.content or ""
            except InternalServerError as error:
                return error

        with ThreadPoolExecutor(6) as pool:
            refused = [answer for answer in pool.map(ask, [False] * 6) if not isinstance(answer, str)]
            assert refused and {error.status_code for error in refused} == {503}
            assert all(error.response.headers["retry-after"] and error.code == "server_is_overloaded" for error in refused)
            assert all(isinstance(answer, str) for answer in pool.map(ask, [True] * 6))


@pytest.mark.slow
def test_an_error_within_a_stream_is_raised(server_process: Any, api_key: str) -> None:
    hasty = server_process("--api-key", api_key, "--request-timeout", "0.5")
    with OpenAI(base_url=hasty.url + "/v1", api_key=api_key, max_retries=0) as client:
        long: Any = fields("foretoken-demo", n=8, max_tokens=1900, extra_body={"ignore_eos": True})
        stream = client.chat.completions.create(**long, stream=True)
        with pytest.raises(APIError, match="did not finish within"):
            for _ in stream:
                pass
