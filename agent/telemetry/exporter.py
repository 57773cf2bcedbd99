"""HTTP server for one rank's /metrics, on a port of its own."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import selectors
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
"""Maximum number of concurrent connections. Each takes a thread and a file descriptor of the training process. When all
are in use, a new connection closes the oldest one."""
CONNECTION_SECONDS = 10.0
"""Time limit of a connection, for request and response. A scrape takes milliseconds; a longer connection is closed."""
CONNECTION_WAIT_SECONDS: Final = 0.05
"""When all connections are in use: time that a new connection waits for another one to end before the oldest is
closed."""
POLL_SECONDS: Final = 2.0
"""Interval at which the accepting thread checks whether the object whose metrics it serves was garbage-collected, and
whether a connection is open for too long. Each check takes a core from the training."""
PAUSE_SECONDS: Final = 0.5
"""Pause of the accepting thread when it could not accept a connection."""


class Exporter:
    """Server of one rank's /metrics at `bind`:`port`; port 0 takes a free port.

    answer: bound method that returns the text of the response; its argument is whether the client asks for the
        OpenMetrics format. Its object is held weakly: the server ends when the object is garbage-collected.
    overhead: `overhead["exporter"]` grows by the CPU seconds that scrapes take.
    strict: if the port is taken, True raises ConfigError, and False uses a free port instead.
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
            remedy = (
                "Raise the limit of open files (ulimit -n)."
                if error.errno in (errno.EMFILE, errno.ENFILE)
                else "Choose another metrics_port, or 0 for any free port."
            )
            raise ConfigError(f"/metrics cannot listen on {bind}:{port}: {error.strerror}. {remedy}") from error
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve, name="tidegate-exporter", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the server."""
        self._server.end()
        self._thread.join(timeout=5.0)
        self._server.server_close()


def _server(bind: str, port: int, answer: Callable[[bool], bytes], overhead: dict[str, float], strict: bool) -> _Server:
    """Returns a listening server. If `port` is taken and `strict` is False, logs a warning and uses a free port."""
    try:
        return _Server(bind, port, answer, overhead)
    except OSError as error:
        if strict or not port or error.errno != errno.EADDRINUSE:
            raise
    server = _Server(bind, 0, answer, overhead)
    log.warning(
        "metrics_port=%d is taken on %s: /metrics is served on port %d instead", port, bind, server.server_port,
        extra=event("port_taken", port=port, instead=server.server_port),
    )  # fmt: skip
    return server


class _OwnerCollectedError(Exception):
    """Raised in the accepting thread to end the server, because the object whose metrics it serves was
    garbage-collected."""


class _Server(ThreadingHTTPServer):
    """HTTP server with one thread per connection, and at most `CONNECTIONS` connections. It adds all its CPU seconds to
    `overhead["exporter"]`, not only those for collecting the metrics."""

    request_queue_size = 16
    """Number of connections that may wait in the kernel. There they take no file descriptor."""
    timeout = 0.0
    """Seconds for which `handle_request` waits for a connection."""

    def __init__(self, bind: str, port: int, answer: Callable[[bool], bytes], overhead: dict[str, float]) -> None:
        self.answer = weakref.WeakMethod(answer)
        self._overhead = overhead
        self._counting = threading.Lock()
        self._accepting = 0.0
        self._free_connections = threading.Semaphore(CONNECTIONS)
        self._open: dict[socket.socket, float] = {}
        """Open connections, oldest first, with the time (monotonic) at which each began."""
        self._logged_failure = False
        self._ending = False
        self._owner = os.getpid()
        self.address_family = socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        self._waiting = selectors.DefaultSelector()  # not in the thread: here, an error reaches who starts the server
        super().__init__((bind, port), _Handler)  # if it fails, it calls server_close
        self._waiting.register(self, selectors.EVENT_READ)

    def serve(self) -> None:
        """Accepts connections until `end`, or until the owner of `answer` is garbage-collected."""
        try:
            while not self._ending:
                if self._waiting.select(POLL_SECONDS) and not self._ending:
                    self.handle_request()
                self.service_actions()
        except _OwnerCollectedError:
            self.server_close()

    def server_close(self) -> None:
        """Closes the listening socket and what waits on it. `serve` must have ended."""
        super().server_close()
        self._waiting.close()

    def end(self) -> None:
        """Ends `serve`."""
        self._ending = True
        if os.getpid() == self._owner:  # a forked child has the same socket, but not the thread
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accepts a connection. If all connections are in use and none ends within CONNECTION_WAIT_SECONDS, the oldest
        one is closed first. If none is free even then, or no file descriptor is free, OSError is raised after a delay,
        and the new connection waits in the kernel."""
        if not self._free_connections.acquire(timeout=CONNECTION_WAIT_SECONDS):
            self._disconnect(self._oldest())
            if not self._free_connections.acquire(timeout=PAUSE_SECONDS):
                raise OSError(errno.EAGAIN, "all connections of /metrics are busy")
        try:
            accepted = super().get_request()
        except OSError:
            self._free_connections.release()
            time.sleep(PAUSE_SECONDS)
            raise
        with self._counting:
            self._open[accepted[0]] = time.monotonic()
        return accepted

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection, so that another one can be accepted."""
        with self._counting:
            opened_at = self._open.pop(request, None)
        try:
            super().shutdown_request(request)
        finally:
            if opened_at is not None:
                self._free_connections.release()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handles a connection and counts the CPU time of its thread."""
        super().process_request_thread(request, client_address)
        self._count(time.thread_time())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs the first failure of a scrape. Disconnects are not logged."""
        error = sys.exception()
        if not isinstance(error, OSError) and not self._logged_failure:
            self._logged_failure = True
            log.error("a scrape of /metrics failed", exc_info=error, extra=event("scrape_failed"))

    def service_actions(self) -> None:
        """Called in every iteration of the accepting thread's loop. Counts CPU time, ends the server if the object
        whose metrics it serves was garbage-collected, and closes a connection that is open for too long."""
        before, self._accepting = self._accepting, time.thread_time()
        self._count(self._accepting - before)
        if self.answer() is None:
            raise _OwnerCollectedError
        oldest = self._oldest()
        if oldest is not None and time.monotonic() - self._open.get(oldest, math.inf) > CONNECTION_SECONDS:
            self._disconnect(oldest)

    def _oldest(self) -> socket.socket | None:
        with self._counting:
            return next(iter(self._open), None)

    def _disconnect(self, connection: socket.socket | None) -> None:
        """Shuts a connection down: its thread reads the end of the stream, and ends."""
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _count(self, seconds: float) -> None:
        """Adds CPU seconds of the server to the reported overhead (CPU time that Tidegate takes from training)."""
        with self._counting:
            self._overhead["exporter"] += seconds


class _Handler(BaseHTTPRequestHandler):
    """Responds with all metrics, in the format that the request accepts. Not compressed: the response has a few
    kilobytes."""

    server: _Server
    timeout = 5
    """Seconds after which a connection without data is closed."""

    def do_GET(self) -> None:
        """Sends the metrics, or status 503 if the object that provides them was garbage-collected."""
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
        """Disables the access log."""
