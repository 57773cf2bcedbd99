"""A daemon that does harm: what it answers to each request is a test's."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Answer = Callable[[socket.socket], None]
"""Writes to the connection; it may go on for as long as the connection is open."""


@dataclass
class Hostile:
    """`url`: where it listens. `asked`: the first line of each request, in their order; `heads`: all their headers."""

    url: str
    asked: list[str] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)


@contextlib.contextmanager
def hostile(answer: Callable[[str, int], Answer], tls: ssl.SSLContext | None = None) -> Iterator[Hostile]:
    """Each request gets `answer(first line, how many came before)`. tls: for https."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        made = Hostile(f"{'http' if tls is None else 'https'}://127.0.0.1:{listening.getsockname()[1]}")
        connections: list[socket.socket] = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection = listening.accept()[0]
                    connections.append(connection)
                    threading.Thread(target=serve, args=(connection,), daemon=True).start()

        def serve(connection: socket.socket) -> None:
            with contextlib.suppress(OSError):
                if tls is not None:
                    connection = tls.wrap_socket(connection, server_side=True)
                    connections.append(connection)
                while head := _request(connection):
                    first, _, headers = head.partition("\r\n")
                    made.asked.append(first)
                    made.heads.append(headers)
                    answer(first, len(made.asked) - 1)(connection)

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield made
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()


def _request(connection: socket.socket) -> str:
    """Reads a request whole; its head, empty at the end of the connection."""
    received = b""
    while b"\r\n\r\n" not in received:
        piece = connection.recv(65536)
        if not piece:
            return ""
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    text = head.decode("latin-1")
    lengths = [int(line.split(":")[1]) for line in text.split("\r\n") if line.lower().startswith("content-length:")]
    left = (lengths[0] if lengths else 0) - len(body)
    while left > 0:
        left -= len(connection.recv(min(left, 65536)) or b"?" * left)
    return text


def plain(body: bytes | str | object, status: int = 200, headers: str = "") -> Answer:
    """A whole answer; what is neither bytes nor text is sent as JSON."""
    content = body if isinstance(body, bytes) else (body if isinstance(body, str) else json.dumps(body)).encode()

    def write(connection: socket.socket) -> None:
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\n{headers}\r\n"
        connection.sendall(head.encode() + content)

    return write


def trickling(start: bytes, pause: float = 0.02) -> Answer:
    """`start`, then a byte now and then for ever."""

    def write(connection: socket.socket) -> None:
        connection.sendall(start)
        never = threading.Event()
        while not never.wait(pause):
            connection.sendall(b"a")

    return write


def lease(**directive: Any) -> dict[str, Any]:
    """What a hello or a report is answered with."""
    told = {"committed": 0, "committed_knobs": {}, **directive}
    return {"lease_seconds": 10.0, "directive": told}
