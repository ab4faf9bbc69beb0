"""One client's connection: uvicorn's HTTP/1.1 with limits on how long a client may keep us waiting, either way.

Owns the clocks of a socket and what is said to bytes that are no HTTP. Knows no request.
"""

import asyncio
import json
import logging

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import ApiError

logger = logging.getLogger("foretoken.server")

HEAD_DEADLINE_S = 10.0
"""From a connection's opening, or a later request's first byte, to the end of its headers."""
STALLED_S = 30.0
"""A client that takes no byte of what waits for it for so long is gone."""


class ChunkedConnection(h11.Connection):
    """h11's state machine, which tells whether it is in the middle of a chunked body."""

    transport: asyncio.Transport
    in_chunked_body = False

    def send(self, event: h11.Event) -> bytes | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        is_piece = type(event) is h11.Data
        if is_piece and self.in_chunked_body and self.transport.is_closing():
            return b""  # the app learns of it a turn of the loop later; of each piece that it sends until then asyncio would warn
        sent = super().send(event)
        if not is_piece:
            self.in_chunked_body = sent is not None and b"\r\ntransfer-encoding: chunked\r\n" in sent.lower()
        return sent


class Connection(H11Protocol):
    """Closes on a client that trickles its headers or stops reading; the app learns of it as of any disconnect.

    It is in scope["state"] as `outlet`, for who streams: a piece of a chunked body changes no state of any layer in between.
    """

    conn: ChunkedConnection

    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        limit = self.config.h11_max_incomplete_event_size
        self.conn = ChunkedConnection(h11.SERVER) if limit is None else ChunkedConnection(h11.SERVER, limit)
        self.conn.transport = transport
        self.app_state = {**self.app_state, "outlet": self}
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_DEADLINE_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer = _cancel(self._head_timer)
        self._stall_timer = _cancel(self._stall_timer)
        super().connection_lost(exc)
        self.app_state = {}  # which else would keep this, and the last request, until the collector comes
        if self.scope:
            self.scope.get("state", {}).pop("outlet", None)

    @property
    def is_ready(self) -> bool:
        """Whether a piece can go now: a chunked body has begun, and the client keeps up."""
        return self.conn.in_chunked_body and not self.flow.write_paused

    @property
    def is_paused(self) -> bool:
        """Whether bytes wait already for a client that does not keep up."""
        return self.flow.write_paused

    def write_piece(self, piece: bytes) -> None:
        """Send some bytes, at least one, of a chunked body, if the client has not gone."""
        if not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # Body bytes after the answer, which nobody reads, only delay the next request: they are on the same clock.
        answered = self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY
        if self.conn.their_state is not h11.IDLE and not answered:
            self._head_timer = _cancel(self._head_timer)
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(HEAD_DEADLINE_S, self.transport.close)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._stall_timer = _cancel(self._stall_timer)
        super().resume_writing()

    def _watch(self, num_waiting: int) -> None:
        """Look again after a while whether any of the bytes that wait has left."""

        def look() -> None:
            left = self.transport.get_write_buffer_size()
            if left < num_waiting:
                self._watch(left)
            else:
                logger.info("a client has taken nothing for %g s: its connection is closed", STALLED_S)
                self.transport.abort()

        self._stall_timer = self.loop.call_later(STALLED_S, look)

    def send_400_response(self, msg: str) -> None:
        """The answer to bytes that are no HTTP, in the one error shape; none where an answer has begun already."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(ApiError(400, msg, code="invalid_http").body).encode()
            headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
            for event in (h11.Response(status_code=400, headers=headers, reason=b"Bad Request"), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle and not self.cycle.response_complete:  # whose head was fine: the app's answer would come after this one
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def _should_upgrade(self) -> bool:
        return False  # to other protocols: the wish is ignored, as HTTP allows


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
