"""What becomes of more clients than a process may have open files. How an address is taken: test_cli.py."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import subprocess
import sys

import pytest
from running_server import environment

from foretoken.server.launch import ending_signals
from foretoken.server.listener import OUT_OF_RESOURCES, TOLD_EVERY_S, tell_refused_connections

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
