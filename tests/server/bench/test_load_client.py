"""The measuring client against servers that answer in every way that HTTP allows, or do not."""

import asyncio
import json
import socket
import time
from collections.abc import Callable

import pytest

from foretoken.server.bench.load_client import Answer, LoadClient, ServerFailed

PATH = "/v1/completions"
USAGE = {"completion_tokens": 3, "prompt_tokens": 5}
WHOLE = json.dumps({"choices": [{"text": "a b c"}], "usage": USAGE}).encode()
EVENTS = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"content": "a é"}}]},
    {"choices": [{"delta": {"content": " c"}}]},
    {"choices": None, "usage": USAGE},  # as some servers have it; others []
]
STREAM = (
    b": a comment\n\n" + b"".join(b"data: " + json.dumps(e, ensure_ascii=False).encode() + b"\n\n" for e in EVENTS) + b"data: [DONE]\n\n"
)


def with_length(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    coded = b"".join(f"{len(piece):X};note=1\r\n".encode() + piece + b"\r\n" for piece in pieces)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + coded + b"0\r\n\r\n"


def until_closed(body: bytes) -> bytes:
    return b"HTTP/1.0 200 OK\r\nserver: old\r\n\r\n" + body


def ask(raw: bytes, act: Callable[[LoadClient], object], *, delay_s: float = 0.0, timeout_s: float = 10.0) -> tuple[object, str]:
    """What the client makes of a server that sends these bytes, and what the server was asked."""
    asked = ""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.lower().split("content-length:")[1].split()[0])
            asked = head + (await reader.readexactly(length)).decode()
            await asyncio.sleep(delay_s)
            writer.write(raw)
            await writer.drain()
        finally:
            writer.close()

    async def run() -> object:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            client = LoadClient(f"http://127.0.0.1:{port}/v1/", "KEY", timeout_s)
            return await act(client)  # pyright: ignore[reportGeneralTypeIssues]

    return asyncio.run(run()), asked


@pytest.mark.parametrize("raw", [with_length(WHOLE), chunked(WHOLE, 7), until_closed(WHOLE)], ids=["length", "chunked", "closed"])
def test_a_whole_answer(raw: bytes) -> None:
    answer, asked = ask(raw, lambda client: client.complete(PATH, {"prompt": "é"}, stream=False), delay_s=0.05)
    assert isinstance(answer, Answer)
    assert (answer.tokens, answer.prompt_tokens, answer.text, answer.first_s, answer.chunks) == (3, 5, "a b c", None, 0)
    assert 0.05 <= answer.seconds < 5
    assert asked.startswith(f"POST {PATH} HTTP/1.1\r\n") and "Authorization: Bearer KEY\r\n" in asked
    assert json.loads(asked.split("\r\n\r\n")[1]) == {"prompt": "é"}


@pytest.mark.parametrize("size", [1, 5, 4000])
def test_a_stream_however_it_is_cut(size: int) -> None:
    answer, asked = ask(chunked(STREAM, size), lambda client: client.complete(PATH, {"prompt": "x"}, stream=True))
    assert isinstance(answer, Answer)
    assert (answer.tokens, answer.text, answer.chunks) == (3, "a é c", 2)
    assert answer.first_s and answer.last_s and 0 < answer.first_s <= answer.last_s <= answer.seconds
    sent = json.loads(asked.split("\r\n\r\n")[1])
    assert sent["stream"] is True and sent["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_text(name: str) -> None:
    events = [EVENTS[0], {"choices": [{"delta": {name: "Hm."}}]}, *EVENTS[1:]]
    stream = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    answer, _ = ask(with_length(stream), lambda client: client.complete(PATH, {"prompt": "x"}, stream=True))
    assert isinstance(answer, Answer) and (answer.text, answer.chunks) == ("Hm.a é c", 3)


def test_the_first_model_is_asked_for() -> None:
    models = json.dumps({"data": [{"id": "one"}, {"id": "two"}]}).encode()
    assert ask(with_length(models), lambda client: client.model())[0] == "one"


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (
            with_length(b'{"error": {"message": "no such model"}}', "404 Not Found"),
            "/v1/completions answers with status 404: no such model",
        ),
        (with_length(b"<html>busy</html>", "503 Busy"), "answers with status 503: <html>busy</html>"),
        (with_length(b"hello"), "not with a JSON object: is it an OpenAI-compatible server"),
        (with_length(b"[1]"), "not with a JSON object: is it an OpenAI-compatible server"),
        (with_length(b'{"choices": [{"text": "a"}]}'), "no usage that counts them"),
        (with_length(b'{"usage": {"completion_tokens": null}}'), "no usage that counts them"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "does not speak HTTP/1.1"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{", "the connection to .* broke"),
        (b"", "the connection to .* broke"),
    ],
)
def test_bad_answers_say_which_server_and_what(raw: bytes, complaint: str) -> None:
    with pytest.raises(ServerFailed, match=complaint) as caught:
        ask(raw, lambda client: client.complete(PATH, {}, stream=False))
    assert "http://127.0.0.1:" in str(caught.value)


def test_an_error_in_the_middle_of_a_stream() -> None:
    broken = b'data: {"choices": [{"text": "a"}]}\n\ndata: {"error": {"message": "out of memory"}}\n\n'
    with pytest.raises(ServerFailed, match="out of memory"):
        ask(until_closed(broken), lambda client: client.complete(PATH, {}, stream=True))


def test_a_server_that_lists_no_model() -> None:
    with pytest.raises(ServerFailed, match="lists no model"):
        ask(with_length(b'{"data": []}'), lambda client: client.model())


def test_patience_ends() -> None:
    started = time.monotonic()
    with pytest.raises(ServerFailed, match="did not answer within 0.1 s"):
        ask(b"", lambda client: client.model(), delay_s=30, timeout_s=0.1)
    assert time.monotonic() - started < 30


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ServerFailed, match=f"no server answers at http://127.0.0.1:{port} .*start it, or correct the URL"):
        asyncio.run(LoadClient(f"http://127.0.0.1:{port}").model())


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "", "http://[a", "http://a:99999", "http://a:b"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ServerFailed, match="write it as http://HOST:PORT"):
        LoadClient(url)
