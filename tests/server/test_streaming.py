"""What happens on the wire when a client leaves, stalls or waits: by bare ASGI, where each of these is one message."""

import asyncio
import itertools
import json
import re
import threading
from collections.abc import AsyncGenerator
from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast

import pytest
from asking import CHAT, posted
from fake_engine import STATS, FakeEngine
from fastapi import FastAPI
from pydantic_core import to_json
from starlette.testclient import TestClient

from foretoken.engine.async_engine import AsyncEngine
from foretoken.engine.prompt_logprobs import PromptLogprobs
from foretoken.engine.request import SamplingParams, SpeculationStats, TokenDelta, TokenLogprobs
from foretoken.engine.token_stream import TokenStream
from foretoken.server import json_answer, streaming
from foretoken.server.generation import Generation
from foretoken.server.metrics import Metrics
from foretoken.server.schemas import StreamOptions
from foretoken.server.streaming import Chunks


def exchange(
    fake: FakeEngine, body: dict[str, Any], *, app: FastAPI | None = None, leaves_after_s: float | None = None, leaves_at_once: bool = False
) -> list[dict[str, Any]]:
    """One POST /v1/chat/completions: what was sent to a client that leaves with its request, or once the engine works."""
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        if leaves_at_once:
            return {"type": "http.disconnect"}
        while leaves_after_s is None or not fake.num_open:
            await asyncio.sleep(0.001)
        await asyncio.sleep(leaves_after_s)
        return {"type": "http.disconnect"}

    sent = posted(app or fake.app(), "/v1/chat/completions", receive, is_read=not leaves_at_once)
    assert fake.num_open == 0, "work without a reader"
    return sent


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_not_written_by_pythons_own_json(client: TestClient, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """Which takes five times as long, while no stream moves."""
    content = json.dumps(CHAT | {"stream": stream, "logprobs": True, "top_logprobs": 2})

    def refuse(encoder: json.JSONEncoder, value: object) -> str:
        raise AssertionError(value)

    monkeypatch.setattr(json.JSONEncoder, "encode", refuse)
    answer = client.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
    said = answer.text.partition("\n")[0].removeprefix("data: ") if stream else answer.text
    assert answer.headers["content-type"].startswith("text/event-stream" if stream else "application/json")
    assert json.loads(said)["choices"] and "error" not in answer.text


@pytest.mark.parametrize(
    ("path", "body", "wanted"),
    [
        ("/v1/chat/completions", CHAT, {"logprobs": True, "top_logprobs": 2}),
        ("/v1/completions", {"prompt": "Hi"}, {"logprobs": 2}),
        ("/v1/responses", {"input": "Hi"}, {"top_logprobs": 2}),
    ],
)
def test_log_probabilities_are_written_where_no_stream_waits_for_it(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], wanted: dict[str, Any]
) -> None:
    """Those of 64 answers of 2,000 tokens take a quarter of a minute."""
    threads: set[str] = set()

    def noting(value: object) -> bytes:
        threads.add(threading.current_thread().name.partition("_")[0])
        return to_json(value)

    monkeypatch.setattr(streaming, "to_json", noting)
    monkeypatch.setattr(json_answer, "to_json", noting)
    for more in ({}, wanted):
        threads.clear()
        assert client.post(path, json=body | more).status_code == 200
        assert len(threads) == 1 and ("asyncio" in threads) == bool(more)  # the name of to_thread's pool


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_a_client_that_leaves_before_the_first_token_ends_the_work(fake: FakeEngine, stream: bool, n: int) -> None:
    fake.stuck = True
    sent = exchange(fake, CHAT | {"stream": stream, "n": n}, leaves_after_s=0)
    assert len(fake.calls) == 1 and not any(b"data" in message.get("body", b"") for message in sent)


def test_without_leaving_the_same_exchange_is_answered(fake: FakeEngine) -> None:
    sent = exchange(fake, CHAT)
    assert sent[0]["status"] == 200 and fake.reply in sent[1]["body"].decode()


def test_a_long_wait_is_filled_with_comments(fake: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "PING_S", 0.01)
    fake.stuck = True
    sent = exchange(fake, CHAT | {"stream": True}, leaves_after_s=0.1)
    assert sent[0]["status"] == 200 and {message["body"] for message in sent[1:]} == {b": ping\n\n"}


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_client_that_does_not_keep_up_gets_no_comments(monkeypatch: pytest.MonkeyPatch, is_paused: bool) -> None:
    """What waits for it already comes first, and may be the end."""
    monkeypatch.setattr(streaming, "PING_S", 0.01)
    sent: list[Any] = []

    async def content() -> AsyncGenerator[bytes]:
        await asyncio.sleep(0.1)
        yield b"text"

    async def send(message: Any) -> None:
        sent.append(message.get("body"))

    outlet = SimpleNamespace(is_ready=False, is_paused=is_paused)
    stream = streaming.EventStream(cast(Generation, SimpleNamespace(close=lambda: None)), content())
    asyncio.run(stream({"state": {"outlet": outlet}}, asyncio.Event().wait, send))  # pyright: ignore
    assert (b": ping\n\n" in sent) is not is_paused and sent[-2:] == [b"text", b""]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_its_answer_has_begun_is_counted(fake: FakeEngine, stream: bool) -> None:
    """Nothing of the answer has run yet, and still every choice is closed and reported."""
    app = fake.app()
    exchange(fake, CHAT | {"stream": stream, "n": 3}, app=app, leaves_at_once=True)
    assert len(fake.calls) == 1
    assert 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"} 3.0' in TestClient(app).get("/metrics").text


@pytest.mark.parametrize("prompts", [["a"], ["a", "b"]])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_fails(fake: FakeEngine, prompts: list[str], stream: bool) -> None:
    fake.stuck = True
    app = fake.app(request_timeout_s=0.05)
    answer = TestClient(app).post("/v1/completions", json={"prompt": prompts, "stream": stream})
    assert answer.status_code == (200 if stream else 504)
    body = answer.text.splitlines()[0].removeprefix("data: ") if stream else answer.text
    assert json.loads(body)["error"]["code"] == "timeout" and "0.05 s" in body
    assert "try again later" in body and "fewer tokens" not in body
    assert fake.num_open == 0


class Shape:
    """A route's, of a model whose name looks like JSON."""

    name = '"\\u0000","text":"\0'
    only_text = True

    def envelope(self, *, chunk: bool) -> dict[str, Any]:
        return {"id": "x", "model": self.name}

    def opening(self) -> list[dict[str, Any]]:
        return []

    def chunks(self, index: int, delta: TokenDelta) -> list[dict[str, Any]]:
        return [{"index": index, "text": delta.text, "finish_reason": delta.finish_reason}]

    def choice(self, index: int, deltas: list[TokenDelta]) -> dict[str, Any]:
        raise NotImplementedError


@pytest.mark.parametrize("include_usage", [False, True])
def test_whatever_the_text_a_chunk_is_one_event_that_holds_it(include_usage: bool) -> None:
    chunks = Chunks(cast(Generation, SimpleNamespace(finished=False)), Shape(), StreamOptions(include_usage=include_usage))
    for text in ["word", "", "\0", '"', "a\\", "\n\ndata: [DONE]\n\n", "\r", "\u2028", "\u2029é", "\x85", "é世🦊", '"}]}']:
        for index in (0, 1):
            spelled = chunks(index, TokenDelta("r", index, [1], text, [-1]))
            assert spelled.startswith(b"data: ") and spelled.endswith(b"\n\n") and len(spelled.decode().splitlines()) == 2, spelled
            usage = {"usage": None} if include_usage else {}
            choices = [{"index": index, "text": text, "finish_reason": None}]
            assert json.loads(spelled[6:]) == {"id": "x", "model": Shape.name, **usage, "choices": choices}


@pytest.mark.parametrize("says_its_end", [False, True])
def test_the_token_that_ends_an_answer_is_told_behind_the_text(says_its_end: bool) -> None:
    """guidance takes the tokens of a chunk for its text: a step may bring the last words and the end at once."""

    class Tokens(Shape):
        def chunks(self, index: int, delta: TokenDelta) -> list[dict[str, Any]]:
            told = {"text": delta.text, "tokens": delta.token_ids, "said": len(delta.logprobs or ()), "end": delta.finish_reason}
            return [told | {"of_prompt": delta.prompt_logprobs is not None}]

    def told(stop_reason: str | None) -> list[list[Any]]:
        logprobs = [TokenLogprobs(-0.5, 1, ())] * 3
        prompt = PromptLogprobs([1], 0)
        delta = TokenDelta("r", 0, [5, 6, 2], "two words", [0, 0, -1], logprobs, "stop", stop_reason, prompt_logprobs=prompt)
        return [list(json.loads(line[6:])["choices"][0].values()) for line in chunks(0, delta).decode().split("\n\n") if line]

    params = SamplingParams(include_stop_str_in_output=says_its_end)
    chunks = Chunks(cast(Generation, SimpleNamespace(finished=False, params=params)), Tokens(), StreamOptions())
    whole = [["two words", [5, 6, 2], 3, "stop", True]]
    assert told(None) == (whole if says_its_end else [["two words", [5, 6], 2, None, True], ["", [2], 1, "stop", False]])
    assert told("wor") == whole, "of a stop string the text has what stands before it"


@pytest.mark.parametrize(("n", "fails_at"), [(1, None), (3, None), (1, 9)])
@pytest.mark.parametrize("ready_in_turn", [[True], [False], [True, False, False]], ids=["always", "never", "at times"])
def test_the_wire_has_the_same_whichever_way_the_chunks_take(n: int, fails_at: int | None, ready_in_turn: list[bool]) -> None:
    """Past the reader as they come, or through it: each once, in order, with all that is counted and what goes wrong."""

    class Words(Shape):
        def opening(self) -> list[dict[str, Any]]:
            return [{"index": index, "text": "so: ", "finish_reason": None} for index in range(n)]

        def chunks(self, index: int, delta: TokenDelta) -> list[dict[str, Any]]:
            if delta.token_ids == [fails_at]:
                raise ValueError("cannot be spelled")
            return super().chunks(index, delta)

    class Wire(list[bytes]):
        """Also the outlet; remembers by which way."""

        ready = itertools.cycle(ready_in_turn)
        num_past = 0

        @property
        def is_ready(self) -> bool:
            return next(self.ready)

        is_paused = False

        def write_piece(self, piece: bytes) -> None:
            self.num_past += 1
            self.append(piece)

    async def play(wire: Wire, outlet: Wire | None) -> Generation:
        stream = TokenStream([f"r-{choice}" for choice in range(n)], lambda ids: None)
        engine = cast(AsyncEngine, SimpleNamespace(generate=lambda *_, **__: stream))
        params, metrics = SamplingParams(n=n, max_tokens=20), Metrics(lambda: STATS, "tiny", ("ngram",), None)
        generation = Generation(engine, metrics, [[1]], params, request_id="r", arrival_time=0.0)
        shape = Words()
        shape.only_text = fails_at is None

        async def read() -> None:
            async for piece in streaming.events(generation, shape, StreamOptions(include_usage=True), outlet):
                wire.append(piece)

        with closing(generation):
            reader = asyncio.create_task(read())
            for token in range(20):
                for choice in range(n):
                    end = "length" if token == 19 else None
                    stats = SpeculationStats() if end else None
                    stream.put(TokenDelta(f"r-{choice}", choice, [token], f"w{token} ", [-1], None, end, stats=stats))
                for _ in range(4):
                    await asyncio.sleep(0)
            await reader
        return generation

    plain, mixed = Wire(), Wire()
    asyncio.run(play(plain, None))
    generation = asyncio.run(play(mixed, mixed))
    times = re.compile(rb'"(time_to_first_token_ms|generation_time_ms|mean_itl_ms|tokens_per_second)":[0-9.]+')
    assert times.sub(b"", b"".join(mixed)) == times.sub(b"", b"".join(plain))
    assert mixed.num_past == {"[True]": 18 * n, "[False]": 0}.get(str(ready_in_turn), mixed.num_past) or fails_at is not None
    assert (mixed.num_past > 0) == (True in ready_in_turn) and mixed[-1].endswith(b"data: [DONE]\n\n")
    if fails_at is None:
        assert [choice.num_tokens for choice in generation.choices] == [20] * n
    else:
        assert b"w8 " in b"".join(mixed) and b"w10 " not in b"".join(mixed) and b"internal_error" in mixed[-1]
