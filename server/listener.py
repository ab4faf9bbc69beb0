"""The listening socket, opened before anything slow, so that a port in use is known within a second; and how many may come in by it."""

import asyncio
import errno
import ipaddress
import logging
import math
import os
import resource
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..engine.errors import ConfigError

logger = logging.getLogger("foretoken.server")

BACKLOG = 2048
MAX_OPEN_FILES = 65_536
OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
TOLD_EVERY_S = 10.0
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 30, 10, 3


class ListenError(Exception):
    """The address cannot be listened on; the message says what to change."""


def listen(host: str, port: int) -> socket.socket:
    """Bind and listen; clients that connect from now on wait until the server accepts. Port 0 takes any free one.

    Raises ListenError.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        raise ListenError(f"--host {host} cannot be resolved to an address of this machine") from None
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _detect_dead_peers(listener)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ListenError(_advice(error, host, port)) from error
    listener.setblocking(False)
    return listener


@contextmanager
def listen_at(path: str) -> Iterator[socket.socket]:
    """The same at a unix domain socket, whose file goes at the end. Raises ListenError and ConfigError."""
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            _remove_stale(path)
            listener.bind(path)
            listener.listen(BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ListenError(f"--uds {path} is there already: stop the server that listens on it, or name another path") from None
            why = error.strerror or "the path of a socket has at most 107 bytes"  # which Python finds itself
            raise ConfigError(f"cannot listen on --uds {path}: {why}") from None
        listener.setblocking(False)
        inode = os.stat(path).st_ino
        try:
            yield listener
        finally:
            with suppress(OSError):
                if os.stat(path).st_ino == inode:  # else it is another server's by now
                    os.unlink(path)


def _remove_stale(path: str) -> None:
    """What a server that was killed has left behind."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # one that runs may be too busy to answer
        if Path(path).is_socket() and probe.connect_ex(path) == errno.ECONNREFUSED:
            os.unlink(path)


def url(listener: socket.socket, is_tls: bool = False) -> str:
    """Where to reach it from this machine: wildcard addresses are shown as loopback. `unix:PATH` for a file."""
    if listener.family == socket.AF_UNIX:
        return "unix:" + os.path.abspath(listener.getsockname())
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        host = "127.0.0.1"
    elif address.version == 6:
        host = f"[{host}]"
    return f"{'https' if is_tls else 'http'}://{host}:{port}"


def reachable_from_outside(listener: socket.socket) -> bool:
    return listener.family != socket.AF_UNIX and not ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def allow_many_connections() -> None:
    """Let the process open as many files as the system grants it: sessions begin with some 1,024, which as many idle clients use up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # a system with a lower bound of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def tell_refused_connections(loop: asyncio.AbstractEventLoop) -> None:
    """Log at times that clients wait for want of open files. asyncio tells of each try, thousands a second, with tracebacks."""
    told = -math.inf

    def on_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal told
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in OUT_OF_RESOURCES):
            loop.default_exception_handler(context)
        elif (now := loop.time()) - told >= TOLD_EVERY_S:
            told = now
            advice = "new ones wait until others have gone; raise the limit of open files (ulimit -n) if there are to be as many"
            logger.error("a connection cannot be opened (%s): %s", error.strerror, advice)

    loop.set_exception_handler(on_error)


def _detect_dead_peers(listener: socket.socket) -> None:
    """A peer that vanished without closing is found by probes; accepted sockets inherit the setting."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":  # elsewhere the system's own times hold
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


def _advice(error: OSError, host: str, port: int) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"port {port} on {host} is in use: stop the other server or choose another --port (0 takes any free one)"
        case errno.EACCES | errno.EPERM:
            return f"no permission to listen on port {port}: choose a --port above 1023"
        case errno.EADDRNOTAVAIL:
            return f"--host {host} is no address of this machine: 127.0.0.1 is this machine only, 0.0.0.0 all its addresses"
        case _:
            return f"cannot listen on {host} port {port}: {error.strerror}"
