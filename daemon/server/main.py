"""Runs the daemon: takes the port, says where it is, and ends promptly."""

from __future__ import annotations

import contextlib
import errno
import gc
import ipaddress
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any, Final

import uvicorn
from fastapi import FastAPI
from prometheus_client import Counter

from tidegate.daemon.configuration.settings import Settings
from tidegate.daemon.security.connections import Connection, Connections, descriptor_limit, raise_descriptor_limit
from tidegate.daemon.server.app import create_app
from tidegate.daemon.server.http_protocol import Acceptor, Protocol
from tidegate.daemon.storage.database_file import told
from tidegate.daemon.storage.state_directory import exclusive, prepare, unwritable, write_private
from tidegate.errors import DaemonError

LEAST_DESCRIPTORS: Final = 64
log = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """Accepts connections by `connections`' rules; wakes long polls and event streams before it waits for their end."""

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self._connections = connections
        self._acceptors: list[Acceptor] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])  # uvicorn listens on none of them
        self._acceptors = [
            Acceptor(listener, self._connections, self._protocol, self.config.ssl) for listener in sockets or ()
        ]

    def _protocol(self, connection: Connection) -> Protocol:
        made = {"config": self.config, "server_state": self.server_state, "app_state": self.lifespan.state}
        return Protocol(self._connections, connection, **made)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        app: Any = self.config.app
        app.state.plane.close()
        for acceptor in self._acceptors:
            acceptor.close()
        await super().shutdown(sockets)


def serve(settings: Settings) -> int:
    """Runs until SIGTERM or SIGINT. Returns the exit code; what went wrong is told on stderr."""
    try:
        raise_descriptor_limit()
        if (allowed := descriptor_limit()) < LEAST_DESCRIPTORS:
            raise DaemonError(
                f"This process may open {allowed} files and connections, the daemon needs {LEAST_DESCRIPTORS} at "
                "least: raise the limit (ulimit -n, LimitNOFILE)."
            )
        home = prepare(settings.state_dir)
        settings.announced_host(settings.bind)  # before a port is taken
        with exclusive(home), _listen(settings.bind, settings.port) as listener:
            with told("The daemon has not started"):
                server = make_server(create_app(settings), settings)
            if threading.current_thread() is threading.main_thread():
                # Until uvicorn has handlers of its own; and it raises the signal again when it has shut down.
                signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
            _collect_rarely()
            with _announced(settings, listener):
                server.run(sockets=[listener])
    except DaemonError as error:
        print(f"tidegate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


def _collect_rarely() -> None:
    """A collection of all but the youngest stops the event loop for 0.1 to 0.2 s with the steps of 512 ranks in memory,
    and finds nothing: what messages are made of is freed when the last one lets go. The program itself is not looked at
    again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 1_000, 100)


def make_server(app: FastAPI, settings: Settings) -> Server:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    refused: Counter = app.state.refused
    app.state.connections = connections = Connections(
        lambda reason: refused.labels(reason).inc(),
        seconds=settings.request_seconds,
        descriptors=descriptor_limit(),
    )
    return Server(
        uvicorn.Config(
            app,
            loop="auto",
            lifespan="on",
            ws="none",
            access_log=False,
            log_level="warning",
            log_config=None,
            server_header=False,
            ssl_certfile=settings.tls_certificate,
            ssl_keyfile=settings.tls_key,
            timeout_keep_alive=75,  # longer than the client's, so that it never writes to a closing connection
            timeout_graceful_shutdown=2,
        ),
        connections,
    )


def _listen(bind: str, port: int) -> socket.socket:
    """The listening socket, taken before anything else so that a taken port is told at once."""
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it. asyncio sets it on sockets of its own only: without it an answer's body waits for the
        # client to acknowledge the head, 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((bind, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            why = (
                f"Port {port} on {bind} is taken, perhaps by another daemon: choose another with --port, or 0 for any."
            )
        else:
            why = f"The daemon cannot listen on {bind} port {port}: {error.strerror or error}."
        raise DaemonError(why) from error
    return listener


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


@contextlib.contextmanager
def _announced(settings: Settings, listener: socket.socket) -> Iterator[None]:
    """Writes and prints the actual address; the file goes with the daemon."""
    host, port = listener.getsockname()[:2]
    shown = settings.announced_host(host)
    scheme = "https" if settings.tls_certificate else "http"
    url = f"{scheme}://[{shown}]:{port}" if ":" in shown else f"{scheme}://{shown}:{port}"
    path = settings.home / "daemon.json"
    try:
        write_private(path, json.dumps({"url": url, "pid": os.getpid(), "bind": host, "port": port}))
    except OSError as error:
        raise DaemonError(f"The daemon's address cannot be written to {path}: {unwritable(error)}.") from error
    print(f"Tidegate daemon at {url}, state in {settings.home}.", flush=True)
    if not settings.tls_certificate and not _is_loopback(host):
        log.warning("tokens cross the network as they are: give --tls-certificate, or put a TLS proxy in front")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the directory may be gone
            path.unlink()
