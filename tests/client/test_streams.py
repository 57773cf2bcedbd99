"""Connections end in time and take what has bounds: cookies, headers, names with many addresses, proxies, TLS."""

from __future__ import annotations

import contextlib
import gc
import socket
import ssl
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import certificate_for, serving
from tests.hostile import Answer, Hostile, hostile, plain, trickling
from tidegate.client.daemon_client import DaemonClient
from tidegate.client.streams import MAX_HEAD_BYTES
from tidegate.errors import DaemonError, DaemonUnreachable
from tidegate.wire.agent import Vote

SHORT = 0.4
"""Seconds that an exchange may take here."""
LATE = 3.0
"""Seconds after which it has not ended in time; each of many addresses used to get all of the time."""


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def test_each_of_many_threads_has_a_connection() -> None:
    """At a limit, httpcore's pool closes connections that it has given to a thread."""
    all_asked = threading.Barrier(32, timeout=20.0)

    def answer(_: str, __: int) -> Answer:
        all_asked.wait()
        return plain([])

    with hostile(answer) as daemon, DaemonClient(daemon.url, "t") as client, ThreadPoolExecutor(32) as pool:
        assert list(pool.map(lambda _: client.runs(), range(32))) == [[]] * 32


# ---- headers


def test_no_cookie_is_kept_or_sent_back() -> None:
    with (
        hostile(lambda _, number: plain([], headers=cookies(number))) as daemon,
        DaemonClient(daemon.url, "t") as client,
    ):
        client.runs()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(20):
            assert client.runs() == []
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
    assert "cookie" not in "".join(daemon.heads).lower()
    assert grown < 200_000, "20 answers had 640,000 bytes of cookies"


def cookies(number: int) -> str:
    return "".join(f"Set-Cookie: c{number}-{n}={'v' * 4000}; Path=/; Max-Age=999999\r\n" for n in range(8))


HUGE_HEADS = {
    "one long header": b"HTTP/1.1 200 OK\r\nX: " + b"a" * 200_000,
    "many headers": b"HTTP/1.1 200 OK\r\n" + b"X: a\r\n" * 40_000,
    "interim answers": b"HTTP/1.1 100 Continue\r\n\r\n" * 40_000,
    "a long reason": b"HTTP/1.1 200 " + b"a" * 200_000,
}


@pytest.mark.parametrize("head", HUGE_HEADS.values(), ids=list(HUGE_HEADS))
def test_the_headers_of_an_answer_have_a_bound(head: bytes) -> None:
    with hostile(lambda *_: lambda to: to.sendall(head + b"\r\n")) as daemon, DaemonClient(daemon.url, "t") as client:
        with pytest.raises(DaemonUnreachable, match=f"more than {MAX_HEAD_BYTES:,} bytes"):
            client.runs()
        with pytest.raises(DaemonUnreachable, match=f"more than {MAX_HEAD_BYTES:,} bytes"):
            next(client.events("run"))


def test_headers_within_the_bound_and_a_long_body_are_taken() -> None:
    many = "X: a\r\n" * 90  # h11 takes no more than some hundred
    long = plain("[" + " " * 500_000 + "]", headers=many)
    with hostile(lambda *_: long) as daemon, DaemonClient(daemon.url, "t") as client:
        assert client.runs() == []


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n"


def test_chunks_with_long_extensions_are_cut_off() -> None:
    """One byte of content at a time, each with 50,000 bytes that are part of no body."""
    sent = 0

    def answer(to: socket.socket) -> None:
        nonlocal sent
        to.sendall(CHUNKED)
        for _ in range(1_000):
            sent += to.send(b"1;x=" + b"a" * 50_000 + b"\r\n \r\n")

    with hostile(lambda *_: answer) as daemon, DaemonClient(daemon.url, "t") as client:
        with pytest.raises(DaemonUnreachable, match="are content"):
            client.runs()
        with pytest.raises(DaemonUnreachable, match="are content"):
            next(client.events("run"))
    assert sent < 20_000_000


def test_a_body_of_many_small_chunks_is_taken() -> None:
    body = b"".join(b"1\r\n%c\r\n" % byte for byte in b"[" + b" " * 40_000 + b"]") + b"0\r\n\r\n"
    with hostile(lambda *_: lambda to: to.sendall(CHUNKED + body)) as daemon, DaemonClient(daemon.url, "t") as client:
        assert client.runs() == []


# ---- names and addresses


@contextlib.contextmanager
def deaf(addresses: list[str], port: int) -> Iterator[None]:
    """Sockets on these addresses whose backlog is full: whoever connects waits."""
    with contextlib.ExitStack() as stack:
        for address in addresses:
            listening = stack.enter_context(socket.socket())
            listening.bind((address, port))
            listening.listen(0)
            for _ in range(4):
                filler = stack.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex((address, port))
        yield


def resolved(monkeypatch: pytest.MonkeyPatch, addresses: list[str]) -> None:
    """The name head.example has these addresses."""
    system = socket.getaddrinfo

    def look_up(host: Any, port: Any, *more: Any, **named: Any) -> Any:
        if host == "head.example" and not named.get("flags"):
            return [found for address in addresses for found in system(address, port, type=socket.SOCK_STREAM)]
        return system(host, port, *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


def test_all_addresses_of_a_name_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = [f"127.0.0.{n}" for n in range(2, 14)]
    resolved(monkeypatch, addresses)
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        port = probe.getsockname()[1]
    with deaf(addresses, port), DaemonClient(f"http://head.example:{port}", "t", timeout=SHORT) as client:
        began = time.monotonic()
        with pytest.raises(DaemonUnreachable):
            client.runs()
        assert time.monotonic() - began < LATE


def test_the_address_that_answers_is_found_behind_those_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with hostile(lambda *_: plain([])) as daemon:
        port = int(daemon.url.rpartition(":")[2])
        resolved(monkeypatch, ["127.0.0.2", "127.0.0.3", "127.0.0.1"])
        with deaf(["127.0.0.2"], port), DaemonClient(f"http://head.example:{port}", "t", timeout=3.0) as client:
            assert client.runs() == []


def test_a_name_that_is_never_looked_up_holds_up_nobody_and_takes_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answered = list[object](), threading.Event()
    system = socket.getaddrinfo

    def stuck(host: Any, port: Any, *more: Any, **named: Any) -> Any:
        if host != "head.example" or named.get("flags"):
            return system(host, port, *more, **named)
        asked.append(host)
        answered.wait()
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    monkeypatch.setattr(socket, "getaddrinfo", stuck)
    try:
        with DaemonClient("http://head.example:8790", "t", timeout=SHORT) as client:
            began = time.monotonic()
            for _ in range(3):
                with pytest.raises(DaemonUnreachable, match="no answer in time"):
                    client.runs()
            assert time.monotonic() - began < 3 * LATE
            assert len(asked) == 1
    finally:
        answered.set()


@pytest.mark.parametrize("name", ["no-such-name.invalid", "a" * 70 + ".example", "a..b"])
def test_a_name_without_an_address(name: str) -> None:
    with DaemonClient(f"http://{name}:8790", "t", timeout=5.0) as client, pytest.raises(DaemonUnreachable):
        client.runs()


@pytest.mark.parametrize("url", ["http://[::1", "http://a:x", "http://a:99999", "http://a:0", "http://a\x01b"])
def test_what_is_no_address_is_said(url: str) -> None:
    with pytest.raises(DaemonError, match="give http://host:port"):
        DaemonClient(url)


# ---- TLS, and TLS in the TLS of a proxy


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """One of the daemon, one of the proxy."""
    return {
        who: certificate_for(tmp_path_factory.mktemp(who), names)
        for who, names in {"daemon": "DNS:head.example,IP:127.0.0.1", "proxy": "DNS:localhost"}.items()
    }


@contextlib.contextmanager
def tls_proxy(context: ssl.SSLContext, to: str) -> Iterator[tuple[str, bytearray]]:
    """A proxy that speaks TLS and opens tunnels to `to` only; its address, and all that it saw of what was sent."""
    seen = bytearray()
    host, _, port = to.partition("://")[2].rpartition(":")

    def serve(plain_connection: socket.socket) -> None:
        with contextlib.suppress(OSError), context.wrap_socket(plain_connection, server_side=True) as client:
            while b"\r\n\r\n" not in seen:
                seen.extend(client.recv(65536))
            client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            with socket.create_connection((host, int(port))) as server:
                back = threading.Thread(target=relay, args=(server, client, bytearray()), daemon=True)
                back.start()
                relay(client, server, seen)
                back.join(10)

    def relay(source: socket.socket, target: socket.socket, copy: bytearray) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(65536):
                copy.extend(piece)
                target.sendall(piece)
            target.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"https://localhost:{listening.getsockname()[1]}", seen
        finally:
            listening.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def behind_a_proxy(
    certificates: dict[str, tuple[Path, Path]], daemon: Hostile, monkeypatch: pytest.MonkeyPatch, timeout: float = 5.0
) -> Iterator[tuple[DaemonClient, bytearray]]:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates["proxy"][0]))
    with tls_proxy(serving(*certificates["proxy"]), daemon.url) as (address, seen):
        monkeypatch.setenv("https_proxy", address)
        with DaemonClient("https://head.example:8790", "secret", timeout, ca=certificates["daemon"][0]) as client:
            yield client, seen


def test_a_proxy_over_https_sees_nothing_of_what_a_daemon_over_https_is_told(
    certificates: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "[" + " " * 300_000 + "]"
    with (
        hostile(lambda *_: plain(long), serving(*certificates["daemon"])) as daemon,
        behind_a_proxy(certificates, daemon, monkeypatch) as (client, seen),
    ):
        assert client.runs() == []
        client._transport.send("POST", "/v1/agents", body="secret" * 100_000)
    assert "Bearer secret" in daemon.heads[0]
    assert seen.startswith(b"CONNECT head.example:8790 ")
    assert len(seen) > 600_000
    assert b"secret" not in seen
    assert b"/v1/runs" not in seen


def test_a_daemon_that_trickles_behind_such_a_proxy_ends_in_time(
    certificates: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = trickling(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n")
    with (
        hostile(lambda *_: slow, serving(*certificates["daemon"])) as daemon,
        behind_a_proxy(certificates, daemon, monkeypatch, SHORT) as (client, _),
    ):
        began = time.monotonic()
        with pytest.raises(DaemonUnreachable, match="in time"):
            client.runs()
        assert time.monotonic() - began < LATE


@contextlib.contextmanager
def endless_handshake() -> Iterator[str]:
    """What it sends is the beginning of a TLS record that never ends; its address without a scheme."""

    def serve(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            trickling(b"\x16\x03\x03\x40\x00")(connection)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                kept.append(listening.accept()[0])
                threading.Thread(target=serve, args=(kept[-1],), daemon=True).start()

    kept: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            for connection in kept:
                connection.close()


@pytest.mark.parametrize("proxied", [False, True], ids=["direct", "in the TLS of a proxy"])
def test_a_handshake_that_never_ends_ends_in_time(
    proxied: bool, certificates: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with endless_handshake() as address, contextlib.ExitStack() as stack:
        if proxied:
            daemon = Hostile(f"https://{address}")
            client, _ = stack.enter_context(behind_a_proxy(certificates, daemon, monkeypatch, SHORT))
        else:
            client = stack.enter_context(DaemonClient(f"https://{address}", "t", SHORT, ca=certificates["daemon"][0]))
        began = time.monotonic()
        with pytest.raises(DaemonUnreachable):
            client.runs()
        assert time.monotonic() - began < LATE


def test_a_daemon_that_is_not_trusted_behind_such_a_proxy_is_told_nothing(
    certificates: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {**certificates, "daemon": certificates["proxy"]}
    with (
        hostile(lambda *_: plain([]), serving(*certificates["daemon"])) as daemon,
        behind_a_proxy(other, daemon, monkeypatch) as (client, _),
        pytest.raises(DaemonUnreachable, match="not trusted"),
    ):
        client.runs()
    assert daemon.asked == []


# ---- proxies that cannot be


@pytest.mark.parametrize("proxy", ["http://:@@", "http://x:word", "ftp://x", "http://", "http://u:secret@x:99999"])
def test_a_proxy_that_cannot_be_is_said_without_its_password(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", proxy)
    with pytest.raises(DaemonError, match=r"HTTP_PROXY names no proxy that can be used .* NO_PROXY") as error:
        DaemonClient("http://head.example:8790", "t")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_nothing_follows_to_another_host(status: int) -> None:
    with hostile(lambda *_: plain([])) as elsewhere:
        answer = plain("", status, f"Location: {elsewhere.url}/v1/runs\r\n")
        with (
            hostile(lambda *_: answer) as daemon,
            DaemonClient(daemon.url, "t") as client,
            pytest.raises(DaemonError, match="not a Tidegate daemon"),
        ):
            client.runs()
    assert elsewhere.asked == []


def test_a_small_request_goes_in_one_segment() -> None:
    """Its head and its body: the server is woken once."""
    segments: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                segments.append(connection.recv(1 << 20))
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]")
                segments.append(connection.recv(1 << 20))

        thread = threading.Thread(target=serve)
        thread.start()
        with DaemonClient(f"http://127.0.0.1:{server.getsockname()[1]}", "t") as client, pytest.raises(DaemonError):
            client.vote("a", Vote(generation=1, can=True, reason="why"))
        thread.join()
    assert segments[0].startswith(b"POST /v1/agents/a/votes?wait=0.0 HTTP/1.1\r\nHost: 127.0.0.1:")
    assert segments[0].endswith(b'"reason":"why"}')
    assert segments[1] == b""
