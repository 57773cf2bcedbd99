"""HTTP as uvicorn speaks it, where a client that does not wait for answers is read no faster than it is answered.

uvicorn makes an object of each request that comes before the answer to an earlier one, and reads on after each answer:
a client that sends small requests without end fills the memory. Here what a client sends is parsed in small pieces, and
neither parsed nor read while one request waits for the answer to another.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

PIECE_BYTES: Final = 1_024
"""What is parsed at once; it has some fifty requests at most."""


class Flow(FlowControl):
    """Reads nothing while `held`, whoever asks for it."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class Pipelined(HttpToolsProtocol):
    """One connection, on which few requests wait for answers to earlier ones."""

    flow: Flow

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._unparsed = memoryview(b"")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = Flow(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unparsed = memoryview(b"")
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unparsed = memoryview(bytes(self._unparsed) + data) if self._unparsed else memoryview(data)
        self._parse_on()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._parse_on()

    def take(self, piece: bytes) -> None:
        """Parses a piece of what came in."""
        super().data_received(piece)

    def _parse_on(self) -> None:
        """Parses until a request waits for the answer to another one, or nothing is left."""
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
        """Whether it still is this protocol's: a WebSocket is another one's from its handshake on."""
        return not self.transport.is_closing() and self.transport.get_protocol() is self
