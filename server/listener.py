"""The listening socket, opened before anything slow, so that a port in use is known within a second; and how many may come in by it."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import math
import resource
import socket
import sys
from contextlib import suppress
from typing import Any

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


def url(listener: socket.socket) -> str:
    """Where to reach it from this machine: wildcard addresses are shown as loopback."""
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        host = "127.0.0.1"
    elif address.version == 6:
        host = f"[{host}]"
    return f"http://{host}:{port}"


def reachable_from_outside(listener: socket.socket) -> bool:
    return not ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


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
