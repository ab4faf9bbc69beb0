"""The listening socket, opened before anything slow, so that a port in use is known within a second."""

from __future__ import annotations

import errno
import ipaddress
import socket
import sys

BACKLOG = 2048
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
