"""Network connections with one deadline for the whole exchange: name look-up, connecting, TLS, sending and receiving.

The timeouts of httpcore are limits for a single read or write, and for a single address of a host: with them, a peer
that sends a byte now and then could block a thread without limit.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeVar

import httpcore

MAX_HEAD_BYTES: Final = 64 << 10
"""Largest head of a response: status, headers, and all interim responses (1xx) before it."""
_FRAMING_FACTOR: Final = 8
"""Limit for the bytes received of a response body: this factor times the bytes of its content, plus MAX_HEAD_BYTES.
Received bytes that are not content are HTTP framing: a chunk with one byte of content takes six bytes."""
_SMALL_BYTES: Final = 16 << 10
"""Maximum number of written bytes that are held back, to be sent together with later bytes."""
_RECORD_BYTES: Final = 16 << 10
"""The largest TLS record."""

_T = TypeVar("_T")
_this_thread = threading.local()


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Context manager with a deadline, `seconds` from now, for all that this thread sends and receives in the block.

    After the deadline, sending and receiving raise a `httpcore.TimeoutException`. If an outer block has an earlier
    deadline, that one applies.
    """
    before: float | None = getattr(_this_thread, "ends_at", None)
    ends_at = time.monotonic() + seconds
    _this_thread.ends_at = ends_at if before is None else min(before, ends_at)
    try:
        yield
    finally:
        _this_thread.ends_at = before


@contextlib.contextmanager
def bounded_head() -> Iterator[None]:
    """Context manager that limits the head of a response: in its block this thread can receive at most
    `MAX_HEAD_BYTES`.

    The block must end when the headers of the response have been received.
    """
    _this_thread.head_bytes_left = MAX_HEAD_BYTES
    try:
        yield
    finally:
        _this_thread.head_bytes_left = None


def bounded_framing(body: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the pieces of a body. Raises ReadError if far more bytes were received than the pieces contain.

    Without this limit a server could send endless chunk extensions, which httpcore skips.
    """
    content = 0
    received_before = getattr(_this_thread, "received", 0)
    for piece in body:
        content += len(piece)
        received = getattr(_this_thread, "received", 0) - received_before
        if received > MAX_HEAD_BYTES + _FRAMING_FACTOR * content:
            raise httpcore.ReadError(
                f"the server's answer is refused: of {received:,} bytes received, only {content:,} are content, the "
                "rest is HTTP framing"
            )
        yield piece
        received_before = _this_thread.received - received  # the caller may use other connections between two pieces


class Backend(httpcore.NetworkBackend):
    """The network backend for httpcore. A read or write on its connections ends at the deadline of its thread.

    check: called with each new connection before anything is sent on it; if it raises, the exchange ends.
    """

    def __init__(self, check: Callable[[httpcore.NetworkStream], None] | None = None) -> None:
        self._system = httpcore.SyncBackend()
        self._check = check

    def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:  # fmt: skip
        """Connects to the first address of the host that answers; the remaining time is divided among the addresses."""
        stream = self._connect(host, port, timeout, local_address, socket_options)
        if self._check is not None:
            try:
                self._check(stream)
            except BaseException:
                stream.close()
                raise
        return stream

    def _connect(
        self, host: str, port: int, timeout: float | None, local_address: str | None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None,
    ) -> Stream:  # fmt: skip
        with _at_most(timeout):
            addresses = _look_up(host, port)
            for later in reversed(range(len(addresses))):
                left = _left(None, httpcore.ConnectTimeout)
                share = None if left is None else left / (later + 1)
                try:
                    address = addresses[-1 - later]
                    return Stream(self._system.connect_tcp(address, port, share, local_address, socket_options))
                except (httpcore.ConnectError, httpcore.ConnectTimeout):
                    if later == 0:
                        raise
        raise httpcore.ConnectError(f"{host} has no address")

    def sleep(self, seconds: float) -> None:
        self._system.sleep(seconds)


class Stream(httpcore.NetworkStream):
    """A connection with a deadline, plain or with one layer of TLS."""

    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream = stream
        self._unsent = bytearray()
        """Written bytes that are not sent yet, at most `_SMALL_BYTES`. They are sent when a write would exceed this
        limit, or before the next read. So the head and the body of a small request are sent together."""

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if self._unsent:
            with contextlib.suppress(httpcore.WriteError):  # the response may give the reason; else the read fails
                self._send_all(b"", timeout)
        head_bytes_left: int | None = getattr(_this_thread, "head_bytes_left", None)
        if head_bytes_left == 0:
            raise httpcore.ReadError(f"the headers of the answer have more than {MAX_HEAD_BYTES:,} bytes")
        received = self.receive(max_bytes if head_bytes_left is None else min(max_bytes, head_bytes_left), timeout)
        if head_bytes_left is not None:
            _this_thread.head_bytes_left = head_bytes_left - len(received)
        _this_thread.received = getattr(_this_thread, "received", 0) + len(received)
        return received

    def receive(self, max_bytes: int, timeout: float | None) -> bytes:
        """Receives at most `max_bytes`; empty when the peer has ended the connection. Does not apply the limit for the
        head of a response (`bounded_head`)."""
        return self._stream.read(max_bytes, _left(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Writes the buffer. Up to `_SMALL_BYTES` may be held back until a later write or the next read."""
        if len(self._unsent) + len(buffer) <= _SMALL_BYTES:
            self._unsent += buffer
        else:
            self._send_all(buffer, timeout)

    def send(self, buffer: bytes) -> None:
        """Sends bytes that were held back, and the buffer, at once. Does nothing if the buffer is empty."""
        if buffer:
            self._send_all(buffer, None)

    def _send_all(self, buffer: bytes, timeout: float | None) -> None:
        """Sends the unsent bytes and `buffer`, in pieces as the socket accepts them, with one deadline for all pieces:
        a peer that reads slowly does not get new time with each piece."""
        connection = self._stream.get_extra_info("socket")
        rest = memoryview(bytes(self._unsent) + buffer if self._unsent else buffer)
        self._unsent.clear()
        with _at_most(timeout):
            while rest:
                left = _left(None, httpcore.WriteTimeout)
                try:
                    connection.settimeout(left)
                    rest = rest[connection.send(rest) :]
                except TimeoutError as error:
                    raise httpcore.WriteTimeout(str(error)) from error
                except OSError as error:
                    raise httpcore.WriteError(str(error)) from error

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        if self._unsent:
            self._send_all(b"", timeout)
        if self.get_extra_info("ssl_object") is not None:
            return TlsInTls(self, ssl_context, server_hostname, timeout)
        return Stream(self._stream.start_tls(ssl_context, server_hostname, _left(timeout, httpcore.ConnectTimeout)))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)

    def close(self) -> None:
        self._stream.close()


class TlsInTls(Stream):
    """A TLS connection to the daemon inside a TLS connection to a proxy; the proxy cannot read the inner one.

    It is used in place of httpcore's class, whose reads and handshake have no deadline.
    """

    def __init__(
        self, outer: Stream, context: ssl.SSLContext, server_hostname: str | None, timeout: float | None
    ) -> None:
        super().__init__(outer)
        self._outer = outer
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        try:
            self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=server_hostname)
            with _at_most(timeout):
                self._run_tls(self._tls.do_handshake)
        except (httpcore.ReadTimeout, httpcore.WriteTimeout) as error:
            self.close()
            raise httpcore.ConnectTimeout(str(error)) from error
        except (OSError, httpcore.NetworkError) as error:  # ssl.SSLError is an OSError
            self.close()
            raise httpcore.ConnectError(str(error)) from error

    def receive(self, max_bytes: int, timeout: float | None) -> bytes:
        try:
            with _at_most(timeout):
                return self._run_tls(lambda: self._tls.read(max_bytes))
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return b""
        except ssl.SSLError as error:
            raise httpcore.ReadError(str(error)) from error

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        rest = memoryview(buffer)
        try:
            with _at_most(timeout):
                while rest:
                    rest = rest[self._run_tls(lambda rest=rest: self._tls.write(rest)) :]  # type: ignore[misc]
        except ssl.SSLError as error:
            raise httpcore.WriteError(str(error)) from error

    def get_extra_info(self, info: str) -> Any:
        return self._tls if info == "ssl_object" else super().get_extra_info(info)

    def _run_tls(self, operation: Callable[[], _T]) -> _T:
        """Runs a TLS operation to its end; its bytes are sent and received through the outer TLS."""
        while True:
            try:
                result = operation()
            except ssl.SSLWantReadError:
                self._outer.send(self._outgoing.read())
                if received := self._outer.receive(_RECORD_BYTES, None):
                    self._incoming.write(received)
                else:
                    self._incoming.write_eof()
            else:
                self._outer.send(self._outgoing.read())
                return result


def _at_most(timeout: float | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if timeout is None else within(timeout)


def _left(timeout: float | None, over: type[Exception]) -> float | None:
    """The seconds that one read or write may take: `timeout`, or the time until this thread's deadline if that is less.
    None: no limit. Raises an exception of the class `over` when the deadline has passed."""
    ends_at: float | None = getattr(_this_thread, "ends_at", None)
    if ends_at is None:
        return timeout
    left = ends_at - time.monotonic()
    if left <= 0.0:
        raise over("the request and its answer did not end before the deadline of the exchange")
    return left if timeout is None else min(timeout, left)


# ---- names of hosts


class _Lookup(threading.Thread):
    """A thread that looks up the addresses of a host, because the system's look-up has no timeout."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(name="tidegate-look-up", daemon=True)
        self._host_and_port = host, port
        self.found: list[str] = []
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.found = _addresses(*self._host_and_port)
        except Exception as error:
            self.error = error


_lookups: dict[tuple[int, str, int], _Lookup] = {}
"""Look-ups in progress, by process, host and port: all threads that need the same host wait for the same look-up."""
_lookups_lock = threading.Lock()


def _look_up(host: str, port: int) -> list[str]:
    """The numeric addresses of the host, in the order in which they are to be tried."""
    with contextlib.suppress(OSError, ValueError):
        return _addresses(host, port, socket.AI_NUMERICHOST)
    key = os.getpid(), host, port  # a forked child does not have the threads of its parent
    with _lookups_lock:
        lookup = _lookups.get(key)
        if lookup is None:
            lookup = _lookups[key] = _Lookup(host, port)
            lookup.start()
    lookup.join(_left(None, httpcore.ConnectTimeout))
    if lookup.is_alive():
        raise httpcore.ConnectTimeout(f"the look-up of the host name {host} did not end before the deadline")
    with _lookups_lock:
        if _lookups.get(key) is lookup:
            del _lookups[key]
    if lookup.error is not None:
        raise httpcore.ConnectError(f"{host} has no address: {lookup.error}") from lookup.error
    return lookup.found


def _addresses(host: str, port: int, flags: int = 0) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    numeric = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    return list(dict.fromkeys(socket.getnameinfo(address, numeric)[0] for *_, address in found))
