"""Daemon process: listens on the port, announces the address, serves until a signal, and shuts down promptly."""

from __future__ import annotations

import contextlib
import errno
import gc
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

from tidegate.client.discovery import is_loopback
from tidegate.daemon.configuration.settings import Settings
from tidegate.daemon.security.connections import Connection, ConnectionLimiter, descriptor_limit, raise_descriptor_limit
from tidegate.daemon.server.app import create_app
from tidegate.daemon.server.http_protocol import Acceptor, Protocol
from tidegate.daemon.storage.database_file import database_errors_explained
from tidegate.daemon.storage.state_directory import exclusive, prepare, unwritable, write_private
from tidegate.errors import DaemonError

LEAST_DESCRIPTORS: Final = 64
log = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """Uvicorn server that accepts connections under the limits of `connections`.

    At shutdown it wakes long polls and event streams before it waits for them to finish.
    """

    def __init__(self, config: uvicorn.Config, connections: ConnectionLimiter) -> None:
        super().__init__(config)
        self._connections = connections
        self._acceptors: list[Acceptor] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])  # uvicorn itself listens on no socket: the acceptors below do
        self._acceptors = [
            Acceptor(listener, self._connections, self._protocol, self.config.ssl) for listener in sockets or ()
        ]

    def _protocol(self, connection: Connection) -> Protocol:
        arguments = {"config": self.config, "server_state": self.server_state, "app_state": self.lifespan.state}
        return Protocol(self._connections, connection, **arguments)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        app: Any = self.config.app
        app.state.plane.close()
        for acceptor in self._acceptors:
            acceptor.close()
        await super().shutdown(sockets)


def serve(settings: Settings) -> int:
    """Runs the daemon until SIGTERM or SIGINT. Returns the exit code; an error is printed on stderr."""
    try:
        raise_descriptor_limit()
        if (allowed := descriptor_limit()) < LEAST_DESCRIPTORS:
            raise DaemonError(
                f"This process may open {allowed} files and connections, but the daemon needs at least "
                f"{LEAST_DESCRIPTORS}: raise the limit (ulimit -n, LimitNOFILE)."
            )
        home = prepare(settings.state_dir)
        settings.announced_host(settings.bind)  # checks the certificate before a port is taken
        with exclusive(home), _listen(settings.bind, settings.port) as listener:
            with database_errors_explained("The daemon has not started"):
                server = make_server(create_app(settings), settings)
            if threading.current_thread() is threading.main_thread():
                # Needed until uvicorn has installed its own handlers, and after its shutdown, when it raises the signal
                # again.
                signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
            _tune_garbage_collection()
            with _announced(settings, listener):
                server.run(sockets=[listener])
    except DaemonError as error:
        print(f"tidegate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


def _tune_garbage_collection() -> None:
    """Makes Python's garbage collector examine long-lived objects rarely, and objects that exist at start never.

    With the steps of 512 ranks in memory, a collection of long-lived objects stops the event loop for 0.1 to 0.2 s. It
    frees nothing, because the objects of messages are freed by reference counting.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 1_000, 100)


def make_server(app: FastAPI, settings: Settings) -> Server:
    """The server for `app`, with logging and connection limits set up."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    refused: Counter = app.state.refused
    app.state.connections = connections = ConnectionLimiter(
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
    """The listening socket. It is opened before the database, so that a port in use is reported at once."""
    listener = socket.socket(socket.AF_INET6 if ":" in bind else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit TCP_NODELAY. asyncio sets the option on its own sockets only. Without the option
        # a response's body waits 40 ms, until the client has acknowledged the head.
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


@contextlib.contextmanager
def _announced(settings: Settings, listener: socket.socket) -> Iterator[None]:
    """Prints the daemon's actual address and writes it to `daemon.json`, which is deleted when the daemon ends."""
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
    _tell_systemd()
    if not settings.tls_certificate and not is_loopback(host):
        log.warning("tokens cross the network unencrypted: give --tls-certificate, or put a TLS proxy in front")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the directory may be gone
            path.unlink()


def _tell_systemd() -> None:
    """Reports to systemd that the daemon listens and that its tokens are written (`Type=notify`); else does nothing."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
            notified.sendto(b"READY=1", address.replace("@", "\0", 1) if address.startswith("@") else address)
