"""Kinds of harm that a daemon can do: by name, what it answers to each request."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.hostile import Answer, lease, plain, trickling

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
ELSEWHERE = "http://127.0.0.1:1/"
GOOD = json.dumps(lease())


def raw(content: bytes, end: bool = False) -> Answer:
    """These bytes; then the end of the connection, or nothing more."""

    def write(to: socket.socket) -> None:
        to.sendall(content)
        if end:
            to.shutdown(socket.SHUT_RDWR)

    return write


def flood(start: bytes, piece: bytes, seconds: float = 2.0) -> Answer:
    """`start`, then `piece` again and again as fast as it goes."""

    def write(to: socket.socket) -> None:
        to.sendall(start)
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at:
            to.sendall(piece)

    return write


def slow(start: bytes, piece: bytes) -> Answer:
    def write(to: socket.socket) -> None:
        to.sendall(start)
        never = threading.Event()
        while not never.wait(0.02):
            to.sendall(piece)

    return write


def reset(to: socket.socket) -> None:
    to.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    to.close()


def zipped(layers: int) -> Answer:
    content = b" " * 20_000_000
    for _ in range(layers):
        content = gzip.compress(content)
    return plain(content, headers=f"Content-Encoding: {', '.join(['gzip'] * layers)}\r\n")


def directed(**directive: Any) -> Answer:
    return plain(json.dumps({**lease(**directive), **lease(**directive)["directive"]}))


def problem(kind: str, status: int, **more: Any) -> Answer:
    return plain({"type": kind, "detail": "no", **more}, status)


def leased(**more: Any) -> Answer:
    return plain({**lease(), **more})


HELD = {"holder": {"agent": "a", "host": "elsewhere", "pid": 1}}

AFTER_A_HELLO: dict[str, Answer] = {
    # slowness
    "says nothing": raw(b""),
    "trickles nothing but bytes": trickling(b""),
    "trickles headers": trickling(OK + b"X: "),
    "trickles a body": trickling(OK + b"Content-Length: 99999\r\n\r\n"),
    "trickles chunks": slow(CHUNKED, b"1\r\na\r\n"),
    "trickles chunk extensions": slow(CHUNKED + b"1;", b"a"),
    "trickles interim answers": slow(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "trickles trailers": slow(CHUNKED + b"0\r\n", b"X: a\r\n"),
    # ends
    "ends at once": raw(b"", end=True),
    "ends in the status": raw(b"HTTP/1.1 2", end=True),
    "ends in the headers": raw(OK + b"Content-Le", end=True),
    "ends in the body": raw(OK + b"Content-Length: 999\r\n\r\n{", end=True),
    "ends in a chunk": raw(CHUNKED + b"ff\r\n{", end=True),
    "resets": reset,
    # size
    "cookies": plain(GOOD, headers="".join(f"Set-Cookie: c{n}={'v' * 4000}\r\n" for n in range(12))),
    "a header without an end": flood(OK + b"X: ", b"a" * 65536),
    "headers without an end": flood(OK, b"X: a\r\n" * 1000),
    "interim answers without an end": flood(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    "a body without an end": flood(OK + b"\r\n", b" " * 65536),
    "a body of 10 MB": plain(b" " * 10_000_000),
    "chunks without an end": flood(CHUNKED, b"1\r\n \r\n" * 1000),
    "trailers without an end": flood(CHUNKED + b"0\r\n", b"X: a\r\n" * 1000),
    "gzip": zipped(1),
    "gzip in gzip": zipped(2),
    "gzip in gzip in gzip": zipped(3),
    "more after the answer": raw(OK + b"Content-Length: 2\r\n\r\n{}" + b"x" * 100_000),
    "two lengths": plain(GOOD, headers="Content-Length: 7\r\n"),
    "a length of 10^30": raw(OK + b"Content-Length: 1" + b"0" * 30 + b"\r\n\r\n{"),
    "a negative length": raw(OK + b"Content-Length: -1\r\n\r\n{}"),
    # no HTTP, or another one
    "not HTTP": raw(b"SSH-2.0-OpenSSH_9.0\r\n"),
    "zeros": raw(b"\0" * 4096),
    "HTTP/2": raw(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "switches protocols": raw(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n"),
    "status 999": plain("", 999),
    "no content": plain("", 204),
    "asks for a password": plain("", 401, "WWW-Authenticate: Basic realm=x\r\n"),
    # other places
    "elsewhere 301": plain("", 301, f"Location: {ELSEWHERE}\r\n"),
    "elsewhere 307": plain("", 307, f"Location: {ELSEWHERE}\r\n"),
    "elsewhere 308, in a loop": plain("", 308, "Location: /v1/agents\r\n"),
    # no JSON, or another one
    "HTML": plain("<html>hello</html>", headers="Content-Type: text/html\r\n"),
    "another content type": plain(GOOD, headers="Content-Type: image/png\r\n"),
    "no text": plain(b"\xff\xfe\x00"),
    "a lone surrogate": plain('{"lease_seconds": 10, "directive": {"committed_knobs": {"stride": "\\ud800"}}}'),
    "deep lists": plain("[" * 100_000),
    "deep objects": plain('{"a":' * 100_000),
    "a deep problem": plain('{"a":' * 100_000, 500),
    "many digits": plain('{"lease_seconds": ' + "1" * 100_000 + "}"),
    "null": plain("null"),
    "an empty list": plain("[]"),
    "a million keys": plain("{" + ",".join(f'"{n}":1' for n in range(70_000)) + "}"),
    # figures
    "a lease of 0": leased(lease_seconds=0.0),
    "a lease of a day": leased(lease_seconds=86_400.0),
    "a lease of 10^308": leased(lease_seconds=1e308),
    "a lease of NaN": plain('{"lease_seconds": NaN, "directive": {"committed": 0, "committed_knobs": {}}}'),
    "reports every 0 s": leased(report_seconds=0.0),
    "reports every 10^300 s": leased(report_seconds=1e300),
    # knobs
    "an unknown knob": directed(committed=5, committed_knobs={"depth": 3}),
    "a knob out of bounds": directed(committed=5, committed_knobs={"stride": -5}),
    "a knob too large": directed(committed=5, committed_knobs={"host_cache": 2**62}),
    "a knob of another type": directed(committed=5, committed_knobs={"order": 7}),
    "a generation of 2^62": directed(committed=2**62, committed_knobs={"stride": 3}),
    "a proposal that is asked for ever": directed(proposed=9, proposed_knobs={"stride": -1}),
    # problems
    "held": problem("rank-taken", 409, lease_seconds=10.0, **HELD),
    "held for a day": problem("rank-taken", 409, lease_seconds=86_400.0, **HELD),
    "held by a damaged agent": problem("rank-taken", 409, lease_seconds=1e308, holder={}),
    "not authorized": problem("wrong-token", 401),
    "forbidden": problem("wrong-scope", 403),
    "unknown": problem("not-found", 404),
    "an invalid knob": problem("invalid-knob", 422, knob="stride"),
    "too many requests": problem("slow-down", 429),
    "an error": problem("x", 500),
    "an error with control characters": problem("x", 500, title="\x1b[2J" * 100_000),
}  # fmt: skip


def always(answer: Answer) -> Callable[[str, int], Answer]:
    """From the first hello on."""
    return lambda _first, _number: answer


def after_a_hello(answer: Answer) -> Callable[[str, int], Answer]:
    """A good answer to the first request, then the harm."""
    return lambda _first, number: answer if number else plain(GOOD)
