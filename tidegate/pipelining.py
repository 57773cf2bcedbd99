"""HTTP pipelining in uvicorn with bounded memory: requests are read no faster than they are answered.

A client may send requests without waiting for answers (pipelining). uvicorn makes an object of each such request, and
continues to read after each answer, so that a client with endless small requests would fill the memory. These classes
parse the received bytes in small pieces, and neither parse nor read while one request waits for the answer to another.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

PIECE_BYTES: Final = 1_024
"""Size in bytes of the pieces in which received bytes are parsed. A piece contains about fifty requests at most."""
WHOLE_BYTES: Final = 4_096
WHOLE_LINES: Final = 64
"""Maximum number of line ends in received bytes that are parsed at once, and not in pieces; there may be at most
WHOLE_BYTES bytes. A request has at least two line ends, so these bytes contain 32 requests at most."""


class HeldFlowControl(FlowControl):
    """Uvicorn's flow control, except that calls to resume reading have no effect while `held` is True."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class PipelinedProtocol(HttpToolsProtocol):
    """HTTP protocol of one connection. It stops parsing and reading while a parsed request waits for the answer to an
    earlier request, so few requests are in memory."""

    flow: HeldFlowControl

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._unparsed = memoryview(b"")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = HeldFlowControl(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unparsed = memoryview(b"")
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not (self._unparsed or self.pipeline) and len(data) <= WHOLE_BYTES and data.count(b"\n") <= WHOLE_LINES:
            self.take(data)
        else:
            self._unparsed = memoryview(bytes(self._unparsed) + data) if self._unparsed else memoryview(data)
        self._parse_on()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._parse_on()

    def take(self, piece: bytes) -> None:
        """Parses a piece of the received bytes."""
        super().data_received(piece)

    def _parse_on(self) -> None:
        """Parses until a request waits for the answer to another one, or all bytes are parsed."""
        while self._unparsed and not self.pipeline and self._is_open():
            piece, self._unparsed = self._unparsed[:PIECE_BYTES], self._unparsed[PIECE_BYTES:]
            self.take(bytes(piece))
        if not self._is_open():
            self._unparsed = memoryview(b"")
            return
        waited, self.flow.held = self.flow.held, bool(self._unparsed or self.pipeline)
        if self.flow.held:
            self.flow.pause_reading()
        elif waited:
            self.flow.resume_reading()

    def _is_open(self) -> bool:
        """Whether the connection is open and this object still parses its bytes. After a WebSocket handshake another
        protocol object does that."""
        return not self.transport.is_closing() and self.transport.get_protocol() is self
