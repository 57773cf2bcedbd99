"""HTTP whose exchanges end in time: connecting, sending and receiving together, however slowly the other side goes.

The timeouts of httpx are for one read or write each: a peer that sends a byte now and then would hold a thread for
ever.
"""

from __future__ import annotations

import contextlib
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpcore
import httpx

_this_thread = threading.local()


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """What this thread sends and receives in the block ends so many seconds from now at the latest, or when an outer
    block says so, with a `httpx.TimeoutException`. Looking up a host name is not bounded: the system does that."""
    before: float | None = getattr(_this_thread, "ends_at", None)
    ends_at = time.monotonic() + seconds
    _this_thread.ends_at = ends_at if before is None else min(before, ends_at)
    try:
        yield
    finally:
        _this_thread.ends_at = before


class BoundedTransport(httpx.BaseTransport):
    """For the server at `url`, through the proxy that the environment names for it unless `direct`.

    check: is called with each new connection before anything is sent on it; what it raises ends the exchange.
    """

    def __init__(
        self,
        url: httpx.URL,
        trust: ssl.SSLContext,
        direct: bool,
        check: Callable[[httpcore.NetworkStream], None] | None = None,
    ) -> None:
        # Connections are kept for less long than the daemon keeps them, or it would close one under our request.
        limits: dict[str, Any] = {"ssl_context": trust, "keepalive_expiry": 30.0, "network_backend": _Backend(check)}
        proxy = None if direct else _proxy_for(url)
        if proxy is None:
            self._pool = httpcore.ConnectionPool(**limits)
        else:
            kind = httpcore.SOCKSProxy if proxy.url.scheme.startswith("socks") else httpcore.HTTPProxy
            self._pool = kind(str(proxy.url), proxy_auth=proxy.raw_auth, **limits)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        assert isinstance(request.stream, httpx.SyncByteStream)
        url = request.url
        asked = httpcore.Request(
            method=request.method,
            url=httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
            headers=request.headers.raw,
            content=request.stream,
            extensions=request.extensions,
        )
        with _as_httpx():
            answer = self._pool.handle_request(asked)
        assert isinstance(answer.stream, Iterable)
        return httpx.Response(
            answer.status, headers=answer.headers, stream=_Body(answer.stream), extensions=answer.extensions
        )

    def close(self) -> None:
        self._pool.close()


class _Body(httpx.SyncByteStream):
    def __init__(self, stream: Iterable[bytes]) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        with _as_httpx():
            yield from self._stream

    def close(self) -> None:
        close = getattr(self._stream, "close", None)
        if close is not None:
            close()


class _Backend(httpcore.NetworkBackend):
    """Opens connections that know when the exchange of the thread which uses them has to end."""

    def __init__(self, check: Callable[[httpcore.NetworkStream], None] | None = None) -> None:
        self._system = httpcore.SyncBackend()
        self._check = check

    def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:  # fmt: skip
        timeout = _left(timeout, httpcore.ConnectTimeout)
        stream = _Stream(self._system.connect_tcp(host, port, timeout, local_address, socket_options))
        if self._check is not None:
            try:
                self._check(stream)
            except BaseException:
                stream.close()
                raise
        return stream

    def sleep(self, seconds: float) -> None:
        self._system.sleep(seconds)


class _Stream(httpcore.NetworkStream):
    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream = stream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """In pieces of what the socket takes: a peer that reads slowly gets no new time with each of them."""
        socket = self._stream.get_extra_info("socket")
        rest = memoryview(buffer)
        while rest:
            left = _left(timeout, httpcore.WriteTimeout)
            try:
                socket.settimeout(left)
                rest = rest[socket.send(rest) :]
            except TimeoutError as error:
                raise httpcore.WriteTimeout(str(error)) from error
            except OSError as error:
                raise httpcore.WriteError(str(error)) from error

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _Stream(self._stream.start_tls(ssl_context, server_hostname, _left(timeout, httpcore.ConnectTimeout)))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)

    def close(self) -> None:
        self._stream.close()


def _left(timeout: float | None, over: type[Exception]) -> float | None:
    """The seconds that one read or write may take; raises `over` when the exchange has none left."""
    ends_at: float | None = getattr(_this_thread, "ends_at", None)
    if ends_at is None:
        return timeout
    left = ends_at - time.monotonic()
    if left <= 0.0:
        raise over("the exchange took too long")
    return left if timeout is None else min(timeout, left)


@contextlib.contextmanager
def _as_httpx() -> Iterator[None]:
    """Errors of httpcore as httpx has them; their names are the same."""
    try:
        yield
    except Exception as error:
        kind = getattr(httpx, type(error).__name__, None) if type(error).__module__.startswith("httpcore") else None
        if kind is None:
            raise
        raise kind(str(error)) from error


def _proxy_for(url: httpx.URL) -> httpx.Proxy | None:
    """The proxy that HTTP_PROXY, HTTPS_PROXY or ALL_PROXY name for this address, unless NO_PROXY excepts it."""
    named = urllib.request.getproxies()
    proxy = named.get(url.scheme) or named.get("all")
    if not proxy or urllib.request.proxy_bypass(url.host):
        return None
    return httpx.Proxy(proxy if "://" in proxy else f"http://{proxy}")
