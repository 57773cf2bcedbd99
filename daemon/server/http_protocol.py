"""Uvicorn's HTTP protocol with limits on header size, framing and time; and the acceptor of new connections."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import re
import socket
import ssl
from collections.abc import Callable
from typing import Any, Final

import httptools
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from tidegate.daemon.problems import problem
from tidegate.daemon.security.connections import Connection, ConnectionLimiter, Reason
from tidegate.daemon.security.middleware import AUTHORITY
from tidegate.pipelining import WHOLE_BYTES, PipelinedProtocol

MAX_HEADER_BYTES: Final = 65_536
"""Limit for the request line and headers; trailers and the framing of chunks count as well."""
FRAMING: Final = 8
"""Bytes of framing that a chunked body may have for each byte of content, in addition to `MAX_HEADER_BYTES`."""
BACKLOG: Final = 2_048
AT_ONCE: Final = 16
"""Number of connections that are accepted one after another before the event loop serves open connections again. Also
the number of connections that are closed when no file descriptor is free."""
PAUSE_SECONDS: Final = 0.05
"""Pause before the next try when no connection can be accepted."""
_AUTHORITY_END: Final = re.compile(rb"[/?#]")
_NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
NO_UPGRADE: Final = "The daemon speaks HTTP/1.1 and nothing else: send a request with a body without `Upgrade`."


class _UpgradeWithBody(Exception):
    """Raised for a request with a body and an Upgrade header: the parser would treat its body as the next request."""


class Protocol(PipelinedProtocol):
    """HTTP protocol of one connection. Each request has the limiter's `Connection` object for it in
    `request.state.connection`."""

    def __init__(self, limiter: ConnectionLimiter, connection: Connection, **more: Any) -> None:
        super().__init__(**more)
        self._limiter = limiter
        self._connection = connection
        self._received = 0
        """Bytes received so far of the present request, its body included."""
        self._body = 0
        """Bytes received so far of the body of the present request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._connection.close = self._end
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limiter.unregister(self._connection)
        super().connection_lost(exc)

    def take(self, piece: bytes) -> None:
        self._unset_keepalive_if_required()
        self._received += len(piece)
        try:
            self._parse(piece)
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, OverflowError):
                self._refuse_headers()
            elif isinstance(error.__context__, _UpgradeWithBody):
                self._refuse("invalid", problem(400, "no-upgrade", NO_UPGRADE))
            else:
                self._refuse("invalid", problem(400, "no-http", "This is no valid HTTP/1.1 request."))
            return
        if self._received - self._body > MAX_HEADER_BYTES + FRAMING * self._body:
            self._refuse_headers()
            return
        self._limiter.progress(self._connection)

    def _parse(self, data: bytes) -> None:
        """Passes received bytes to the HTTP parser. An Upgrade header is ignored (RFC 9110, 7.8): the connection stays
        HTTP/1.1."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._connection.incomplete = True
        self.scope["state"]["connection"] = self._connection

    def on_headers_complete(self) -> None:
        few = self._received + WHOLE_BYTES <= MAX_HEADER_BYTES  # `_received` may lack the bytes that began the request
        if not few and len(self.url) + sum(len(n) + len(value) + 4 for n, value in self.headers) > MAX_HEADER_BYTES:
            raise OverflowError
        if self.parser.should_upgrade() and any(_announces_body(name, value) for name, value in self.headers):
            raise _UpgradeWithBody
        if not self.url.startswith(b"/") and b"://" in self.url:
            self.scope["state"][AUTHORITY] = _AUTHORITY_END.split(self.url.partition(b"://")[2], 1)[0].decode("latin-1")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._received = self._body = 0
        self._connection.incomplete = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._limiter.answered(self._connection)
        super().on_response_complete()

    def _refuse_headers(self) -> None:
        detail = f"Request line and headers are larger than the {MAX_HEADER_BYTES} bytes that the daemon takes."
        self._refuse("too-large", problem(431, "headers-too-large", detail))

    def _refuse(self, reason: Reason, answer: Response) -> None:
        self._limiter.refuse(reason, self._connection.address)
        self._answer(answer)

    def _end(self, reason: Reason) -> None:
        """Callback of the connection limiter: closes the connection. A request that is not complete in time first
        gets a 408 response."""
        if reason == "deadline" and self._connection.incomplete and self.transport.get_write_buffer_size() == 0:
            self._answer(problem(408, "too-slow", f"The request did not come in within {self._limiter.seconds:g} s."))
        else:
            self.transport.abort()

    def _answer(self, answer: Response) -> None:
        """Sends the response and closes the connection. If another response has begun or is prepared, it only closes
        the connection and sends nothing."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started or not cycle.more_body or self.pipeline:
                self.transport.abort()
                return
            cycle.disconnected = True  # the application waits for the body: for it, the client has disconnected
            cycle.message_event.set()
        head = [b"%s: %s\r\n" % header for header in (*answer.raw_headers, (b"connection", b"close"))]
        self.transport.write(b"".join((STATUS_LINE[answer.status_code], *head, b"\r\n", bytes(answer.body))))
        self.transport.close()


def _announces_body(name: bytes, value: bytes) -> bool:
    return name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0") != b"")


class Acceptor:
    """Accepts connections of a listening socket in the running event loop, from construction until `close`."""

    def __init__(
        self,
        listener: socket.socket,
        limiter: ConnectionLimiter,
        make: Callable[[Connection], Protocol],
        context: ssl.SSLContext | None,
    ) -> None:
        self._listener, self._limiter, self._make, self._context = listener, limiter, make, context
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._task = self._loop.create_task(self._accept())

    def close(self) -> None:
        for task in (self._task, *self._opening):
            task.cancel()

    async def _accept(self) -> None:
        accepted = 0
        while True:
            try:
                taken, peer = await self._loop.sock_accept(self._listener)
            except OSError as error:
                if error.errno in _NO_DESCRIPTOR:
                    self._limiter.refuse("descriptors", "any address")
                    for _ in range(AT_ONCE):
                        self._limiter.evict()
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            self._take(taken, str(peer[0]))
            accepted += 1
            if accepted % AT_ONCE == 0:
                await asyncio.sleep(0)

    def _take(self, taken: socket.socket, address: str) -> None:
        opening = _PendingConnection(taken)
        connection = self._limiter.register(address, opening.cancel)
        opening.task = task = self._loop.create_task(self._open(opening, connection))
        self._opening.add(task)
        task.add_done_callback(functools.partial(self._opened, opening, connection))

    async def _open(self, opening: _PendingConnection, connection: Connection) -> None:
        """Creates the HTTP protocol object of an accepted connection; with TLS, after the handshake. The limiter's time
        limit includes the handshake."""
        opening.begun = True
        make = functools.partial(self._make, connection)
        with contextlib.suppress(OSError):  # the client has disconnected, or does not speak TLS
            await self._loop.connect_accepted_socket(make, opening.socket, ssl=self._context)
            return
        self._limiter.unregister(connection)

    def _opened(self, opening: _PendingConnection, connection: Connection, task: asyncio.Task[None]) -> None:
        self._opening.discard(task)
        if task.cancelled() or task.exception() is not None:
            self._limiter.unregister(connection)
            if not opening.begun:  # otherwise the event loop closes the socket
                opening.socket.close()


class _PendingConnection:
    """An accepted connection that has no protocol object yet. `begun`: the event loop has taken over the socket."""

    def __init__(self, socket: socket.socket) -> None:
        self.socket = socket
        self.task: asyncio.Task[None] | None = None
        self.begun = False

    def cancel(self, reason: Reason) -> None:
        if self.task is not None:
            self.task.cancel()
