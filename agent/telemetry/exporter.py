"""One rank's /metrics, on a port of its own."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from prometheus_client.exposition import choose_encoder

from tidegate.errors import ConfigError
from tidegate.logs import event

log = logging.getLogger("tidegate")

CONNECTIONS: Final = 4
"""At the same time, each with a thread and a descriptor of the training's. One more ends the oldest of them."""
CONNECTION_SECONDS = 10.0
"""A scrape takes milliseconds; whoever takes longer than this, for the question and the answer, is cut off."""
PATIENCE_SECONDS: Final = 0.05
"""How long one more connection waits for another to end by itself."""
TURN_SECONDS: Final = 0.5
"""Of the accepting thread."""


class Exporter:
    """Serves /metrics of one rank at `bind`:`port`; port 0 takes a free one.

    The method `answer(openmetrics)` gives the text, in one of the two formats. Its object is held weakly: serving ends
    when that is collected. `overhead["exporter"]` grows by the CPU seconds that scrapes take. strict: ConfigError when
    the port is taken, instead of a free one.
    """

    def __init__(
        self,
        answer: Callable[[bool], bytes],
        overhead: dict[str, float],
        bind: str,
        port: int,
        strict: bool = True,
    ) -> None:
        try:
            self._server = _server(bind, port, answer, overhead, strict)
        except OSError as error:
            raise ConfigError(
                f"/metrics cannot listen on {bind}:{port}: {error.strerror}. Choose another metrics_port, or 0 for any."
            ) from error
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve, name="tidegate-exporter", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)


def _server(bind: str, port: int, answer: Callable[[bool], bytes], overhead: dict[str, float], strict: bool) -> _Server:
    try:
        return _Server(bind, port, answer, overhead)
    except OSError as error:
        if strict or not port or error.errno != errno.EADDRINUSE:
            raise
    made = _Server(bind, 0, answer, overhead)
    log.warning(
        "metrics_port=%d is taken on %s: /metrics is served on port %d instead", port, bind, made.server_port,
        extra=event("port_taken", port=port, instead=made.server_port),
    )  # fmt: skip
    return made


class _NobodyLeft(Exception):
    """Ends the accepting thread: what it serves was collected."""


class _Server(ThreadingHTTPServer):
    """One thread a connection, for `CONNECTIONS` of them. All of its CPU time goes to the overhead, not only the
    collecting."""

    request_queue_size = 16
    """Connections that wait in the kernel, where they take no descriptor."""

    def __init__(self, bind: str, port: int, answer: Callable[[bool], bytes], overhead: dict[str, float]) -> None:
        self.answer = weakref.WeakMethod(answer)
        self._overhead = overhead
        self._counting = threading.Lock()
        self._accepting = 0.0
        self._room = threading.Semaphore(CONNECTIONS)
        self._open: dict[socket.socket, float] = {}
        """Connections, oldest first, with the time when each began."""
        self._told = False
        self.address_family = socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        super().__init__((bind, port), _Handler)

    def serve(self) -> None:
        """Until it is shut down, or nobody is left who answers."""
        try:
            self.serve_forever(TURN_SECONDS)
        except _NobodyLeft:
            self.server_close()

    def get_request(self) -> tuple[socket.socket, Any]:
        """OSError, after a while, where there is no room or no descriptor: the connection waits in the kernel."""
        if not self._room.acquire(timeout=PATIENCE_SECONDS):
            self._cut(self._oldest())
            if not self._room.acquire(timeout=TURN_SECONDS):
                raise OSError(errno.EAGAIN, "all connections are busy")
        try:
            found = super().get_request()
        except OSError:
            self._room.release()
            time.sleep(TURN_SECONDS)
            raise
        with self._counting:
            self._open[found[0]] = time.monotonic()
        return found

    def shutdown_request(self, request: Any) -> None:
        with self._counting:
            known = self._open.pop(request, None)
        try:
            super().shutdown_request(request)
        finally:
            if known is not None:
                self._room.release()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        super().process_request_thread(request, client_address)
        self._count(time.thread_time())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that goes away is no news; what else fails is logged once."""
        error = sys.exception()
        if not isinstance(error, OSError) and not self._told:
            self._told = True
            log.error("a scrape of /metrics failed", exc_info=error, extra=event("scrape_failed"))

    def service_actions(self) -> None:
        """Called by the accepting thread in every turn of its loop."""
        before, self._accepting = self._accepting, time.thread_time()
        self._count(self._accepting - before)
        if self.answer() is None:
            raise _NobodyLeft
        oldest = self._oldest()
        if oldest is not None and time.monotonic() - self._open.get(oldest, math.inf) > CONNECTION_SECONDS:
            self._cut(oldest)

    def _oldest(self) -> socket.socket | None:
        with self._counting:
            return next(iter(self._open), None)

    def _cut(self, connection: socket.socket | None) -> None:
        """Its thread sees the end of the connection, and ends."""
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _count(self, seconds: float) -> None:
        with self._counting:
            self._overhead["exporter"] += seconds


class _Handler(BaseHTTPRequestHandler):
    """Answers with all metrics, in the format that is asked for. Not compressed: it is a few kilobytes."""

    server: _Server
    timeout = 5
    """Seconds that a scraper may leave its connection silent."""

    def do_GET(self) -> None:
        _, content_type = choose_encoder(self.headers.get("Accept", ""))
        answer = self.server.answer()
        if answer is None:
            self.send_error(503)
            return
        body = answer(content_type.startswith("application/openmetrics-text"))
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are no news."""
