"""What becomes of more clients than a process may have open files. How an address is taken: test_cli.py."""

import asyncio
import errno
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from running_server import RunningServer, environment

from foretoken.engine.errors import ConfigError
from foretoken.server.launch import ending_signals
from foretoken.server.listener import (
    OUT_OF_RESOURCES,
    TOLD_EVERY_S,
    ListenError,
    listen_at,
    reachable_from_outside,
    tell_refused_connections,
)
from foretoken.server.terminal.client import ChatClient

RAISE = """
import resource
from foretoken.server.listener import allow_many_connections
allow_many_connections()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""
CROWD = """
import asyncio, resource, socket
from foretoken.server.listener import BACKLOG, listen, tell_refused_connections

async def main():
    listener = listen("127.0.0.1", 0)
    tell_refused_connections(asyncio.get_running_loop())
    await asyncio.start_server(lambda reader, writer: writer.write(b"served"), sock=listener, backlog=BACKLOG)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    clients = [socket.create_connection(listener.getsockname()) for _ in range(3)]  # which nobody has accepted yet
    resource.setrlimit(resource.RLIMIT_NOFILE, (clients[-1].fileno() + 1, hard))
    await asyncio.sleep(1.5)  # asyncio tries again every second
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for client in clients:
        client.setblocking(False)
        assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 6), 30) == b"served"

asyncio.run(main())
"""


def run(program: str, *before: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*before, sys.executable, "-c", program], capture_output=True, text=True, env=environment(), timeout=60)


def test_the_limit_of_open_files_is_raised_to_what_the_system_grants() -> None:
    ended = run(RAISE, "bash", "-c", 'ulimit -S -n 64 && ulimit -H -n 500 && exec "$@"', "bash")
    assert ended.stdout == "500 500\n", ended.stderr


def test_clients_for_whom_no_file_is_left_are_one_line_of_the_log() -> None:
    ended = run(CROWD)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stderr.count("a connection cannot be opened (Too many open files)") == 1
    assert len(ended.stderr.splitlines()) == 1


def test_other_errors_of_the_loop_are_told_as_ever(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0

    async def main() -> None:
        nonlocal now
        loop = asyncio.get_running_loop()
        tell_refused_connections(loop)
        loop.time = lambda: now
        for _ in range(3):
            for code in OUT_OF_RESOURCES:
                loop.call_exception_handler({"message": "socket.accept()", "exception": OSError(code, os.strerror(code))})
            now += TOLD_EVERY_S / 2
        loop.call_exception_handler({"message": "something else", "exception": OSError(errno.EIO, "bad")})
        del loop.time

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert [record.name for record in caplog.records] == ["foretoken.server", "foretoken.server", "asyncio"]


def test_a_terminal_that_closes_ends_the_server_unless_nohup_has_it_otherwise() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert set(ending_signals()) == {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert set(ending_signals()) == {signal.SIGTERM, signal.SIGINT}
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_sockets_file_is_taken_over_from_the_dead_and_goes_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with listen_at(str(path)) as listener:
        assert not reachable_from_outside(listener)
        with pytest.raises(ListenError, match="is there already"), listen_at(str(path)):
            pass
    assert not path.exists()
    path.write_text("kept")
    for name, said in {"s": "is there already", "no/s": "No such file", "s" * 108: "at most 107 bytes"}.items():
        with pytest.raises((ListenError, ConfigError), match=said), listen_at(str(tmp_path / name)):
            pass
    assert path.read_text() == "kept"


def test_a_server_at_a_unix_socket(server_process: Callable[..., RunningServer], tiny_target: Path, tmp_path: Path) -> None:
    server = server_process(tiny_target, "--uds", tmp_path / "s")
    assert server.url == f"unix:{tmp_path}/s" and server.complete()["choices"]
    with closing(ChatClient(server.url, None)) as client:
        assert client.choose_model(None) == str(tiny_target)
    assert server.stop() == 0 and not (tmp_path / "s").exists() and f"curl --unix-socket {tmp_path}/s http://localhost/v1/" in server.log
