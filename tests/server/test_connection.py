"""Clients that keep a socket busy: a real uvicorn on a free port, raw sockets, clocks of a fraction of a second."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import h11
import pytest
import uvicorn

from foretoken.server import connection
from foretoken.server.connection import Connection
from foretoken.server.listener import listen

MIB = 2**20
CLOCK_S = 0.4


class App:
    """Answers with `size` bytes in pieces (once with `pieces` and no length, if there are any), the request's body unread. takes_outlet:
    for those of `pieces` for which it is ready.

    Remembers who left early, and that the last of `pieces` was sent.
    """

    def __init__(self) -> None:
        self.size = 3
        self.pieces: Iterable[bytes] = []
        self.takes_outlet = False
        self.num_by_outlet = 0
        self.left = threading.Event()
        self.is_through = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.pieces:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            outlet = scope["state"]["outlet"]
            for piece in self.pieces:
                if self.takes_outlet and piece and outlet.is_ready:
                    self.num_by_outlet += 1
                    outlet.write_piece(piece)
                    continue
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
            self.pieces = []
            self.is_through.set()
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % self.size)]})
        sent = 0
        while sent < self.size:
            piece = min(MIB, self.size - sent)
            sent += piece
            await send({"type": "http.response.body", "body": b"x" * piece, "more_body": sent < self.size})
        if (await receive())["type"] == "http.disconnect" and self.size > 3:
            self.left.set()


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def port(app: App, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(connection, "HEAD_DEADLINE_S", CLOCK_S)
    monkeypatch.setattr(connection, "STALLED_S", CLOCK_S)
    listener = listen("127.0.0.1", 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
    server = uvicorn.Server(uvicorn.Config(app, http=Connection, ws="none", lifespan="off", log_config=None, timeout_keep_alive=2))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join()


def connect(port: int) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)
    client.settimeout(10)
    client.connect(("127.0.0.1", port))
    return client


def read(client: socket.socket) -> bytes:
    """All there is until the server closes."""
    data = b""
    try:
        while piece := client.recv(MIB):
            data += piece
    except ConnectionResetError:
        pass
    return data


GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("first", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n", GET], ids=["nothing", "half a head", "half a second head"])
def test_headers_that_trickle_in_are_waited_for_so_long(port: int, first: bytes) -> None:
    with connect(port) as client:
        client.sendall(first)
        if first == GET:
            time.sleep(0.1)
            client.sendall(b"GET")
        if first:
            with pytest.raises(OSError):  # never idle, never done
                for _ in range(100):
                    client.sendall(b"a")
                    time.sleep(CLOCK_S / 4)
        assert read(client).count(b"200 OK") == (first == GET)


def test_a_body_that_nobody_reads_is_not_taken_for_ever(port: int) -> None:
    with connect(port) as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert b"200 OK" in client.recv(MIB)
        with pytest.raises(OSError):
            for _ in range(100):
                client.sendall(b"1\r\na\r\n")
                time.sleep(CLOCK_S / 20)


def test_a_client_that_stops_reading_is_cut_off_and_the_app_told(app: App, port: int) -> None:
    app.size = 4 * MIB
    with connect(port) as client:
        client.sendall(GET)
        assert app.left.wait(30)
        assert len(read(client)) < app.size


@pytest.mark.parametrize("takes_outlet", [False, True])
def test_pieces_for_a_client_that_has_just_left_are_dropped_without_a_word(
    app: App, port: int, caplog: pytest.LogCaptureFixture, takes_outlet: bool
) -> None:
    """As the chunks of many choices are: all of one step are sent before the loop sees that the first could not be."""
    app.takes_outlet = takes_outlet
    with connect(port) as client:

        def pieces() -> Iterator[bytes]:
            for _ in range(50):
                yield b"x"
                client.close()
                time.sleep(0.002)

        app.pieces = pieces()
        client.sendall(GET)
        assert app.is_through.wait(30)
    assert not caplog.records


def test_a_body_with_a_length_is_whole_for_h11_even_if_the_client_has_just_left() -> None:
    protocol = connection.ChunkedConnection(h11.SERVER)
    protocol.transport = cast(asyncio.Transport, SimpleNamespace(is_closing=lambda: True))
    protocol.receive_data(GET)
    while protocol.next_event() is not h11.PAUSED and protocol.their_state is not h11.DONE:
        pass
    answer = (h11.Response(status_code=200, headers=[("Content-Length", "3")]), h11.Data(data=b"abc"), h11.EndOfMessage())
    assert b"".join(protocol.send(event) or b"" for event in answer).endswith(b"\r\n\r\nabc")


def test_pieces_wait_for_a_client_that_reads_slowly(app: App, port: int) -> None:
    """The outlet takes what the client keeps up with, and no more."""
    pieces = [bytes([65 + number % 26]) * (40_000 + number) for number in range(100)]
    app.takes_outlet, app.pieces = True, pieces
    with connect(port) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert not app.is_through.wait(CLOCK_S / 2), "all of it is in a buffer"
        body = read(client).partition(b"\r\n\r\n")[2]
    assert body == b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    assert 0 < app.num_by_outlet < len(pieces)


def test_a_client_that_reads_slowly_gets_everything(app: App, port: int) -> None:
    app.size = 2 * MIB

    def read_slowly() -> int:
        """The number of bytes that came; over many times what a pause may last."""
        started, got = time.monotonic(), 0
        with connect(port) as client, suppress(ConnectionResetError):
            client.sendall(GET)
            while got < app.size and (piece := client.recv(MIB // 8)):
                got += len(piece)
                time.sleep(0.015)
        assert got < app.size or time.monotonic() - started > 2 * CLOCK_S
        return got

    assert any(read_slowly() >= app.size for _ in range(5)), "cut off each time, and not because the machine halted"


@pytest.mark.parametrize("noise", [b"\x16\x03\x01\x02\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET /\xc3\xa9 HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_bytes_that_are_no_http_are_a_400_in_the_one_shape(port: int, noise: bytes) -> None:
    with connect(port) as client:
        client.sendall(noise)
        head, _, body = read(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and json.loads(body)["error"]["code"] == "invalid_http"


def test_noise_after_an_answer_only_closes(port: int, caplog: pytest.LogCaptureFixture) -> None:
    with connect(port) as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert b"200 OK" in client.recv(MIB)
        client.sendall(b"no chunk\r\n")
        assert b"400" not in read(client)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_noise_behind_a_head_is_the_only_answer(port: int, caplog: pytest.LogCaptureFixture) -> None:
    """It comes with the head, before the app has run: that must not answer once more."""
    with connect(port) as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nno chunk\r\n")
        answer = read(client)
    assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_wish_to_upgrade_is_ignored(port: int, caplog: pytest.LogCaptureFixture) -> None:
    with connect(port) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n")
        assert b"200 OK" in read(client)
    assert not caplog.records


@pytest.mark.parametrize("takes_outlet", [False, True])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_pieces_of_an_answer_without_a_length_arrive_as_they_were(app: App, port: int, version: bytes, takes_outlet: bool) -> None:
    app.takes_outlet = takes_outlet
    app.pieces = pieces = [b"one", b"", b"0\r\n\r\n", b"x" * 70_000]
    text = b"".join(pieces)
    with connect(port) as client:
        client.sendall(b"GET / HTTP/%b\r\nHost: x\r\n\r\n" % version)
        if version == b"1.1":
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")  # its answer has a length again
        received = h11.Connection(h11.CLIENT)
        received.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
        received.send(h11.EndOfMessage())
        received.receive_data(read(client))
        received.receive_data(b"")
    assert app.num_by_outlet == (3 if takes_outlet and version == b"1.1" else 0)
    events: list[Any] = []
    while not events or type(events[-1]) is not h11.EndOfMessage:
        events.append(received.next_event())
    assert b"".join(bytes(event.data) for event in events if type(event) is h11.Data) == text
    following = received.trailing_data[0]
    assert following.endswith(b"\r\n\r\nxxx") and b"content-length: 3" in following if version == b"1.1" else not following
