"""HTTP exchanges over connections with a deadline (`tidegate.client.streams`), through the environment's proxy.

This uses httpcore directly: httpx on top of it doubles the processor time of a small exchange. Agents make such an
exchange every few seconds, on processor cores that the training needs.
"""

from __future__ import annotations

import contextlib
import ssl
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import httpcore

from tidegate.client.httpx_import import httpx
from tidegate.client.streams import Backend, bounded_framing, bounded_head
from tidegate.errors import DaemonError
from tidegate.terminal import visible

HTTP_ERRORS: Final = (
    httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError, httpcore.ProxyError,
    httpcore.UnsupportedProtocol,
)  # fmt: skip
"""Exceptions that httpcore raises when a request gets no complete response."""


class Answer:
    """A response: `status`, `headers`, and the body in pieces, which can be read once."""

    def __init__(self, answer: httpcore.Response) -> None:
        self.status = answer.status
        self.headers = httpx.Headers(answer.headers)
        self._answer = answer

    def pieces(self) -> Iterator[bytes]:
        """The body, piece by piece as it arrives."""
        assert isinstance(self._answer.stream, Iterable)
        return bounded_framing(self._answer.stream)


class HttpClient:
    """An HTTP/1.1 client of the server at `url`. It uses the proxy that the environment names for it, unless `direct`.

    It has no cookies and follows no redirects. An exchange has a deadline if it is made in a `streams.within` block.
    check: called with each new connection before anything is sent on it; if it raises, the exchange ends.
    """

    def __init__(
        self,
        url: httpx.URL,
        trust: ssl.SSLContext,
        direct: bool,
        check: Callable[[httpcore.NetworkStream], None] | None = None,
    ) -> None:
        self._url = url
        self._path = url.raw_path.partition(b"?")[0].rstrip(b"/")
        # Idle connections are kept for less time than the daemon keeps them: it could close one during a request.
        # Their number has no limit, so each thread has one: at its limit, httpcore's pool closes an idle connection to
        # open another one, and can close one that it has given to a thread whose request has not begun.
        limits: dict[str, Any] = {
            "ssl_context": trust, "keepalive_expiry": 30.0, "max_connections": None, "network_backend": Backend(check),
        }  # fmt: skip
        proxy = None if direct else _proxy_for(url)
        if proxy is None:
            self._pool = httpcore.ConnectionPool(**limits)
        elif proxy.url.scheme.startswith("socks"):
            try:
                self._pool = httpcore.SOCKSProxy(str(proxy.url), proxy_auth=proxy.raw_auth, **limits)
            except RuntimeError as error:
                raise DaemonError(
                    f"The proxy {proxy.url} in the environment speaks SOCKS, for which the package socksio is needed: "
                    "install it, or exclude the daemon's host from the proxy with NO_PROXY."
                ) from error
        else:
            # A proxy is checked with the system's certificates: TIDEGATE_CA_FILE is only for the daemon.
            outer = system_trust() if proxy.url.scheme == "https" else None
            self._pool = httpcore.HTTPProxy(
                str(proxy.url), proxy_auth=proxy.raw_auth, proxy_ssl_context=outer, **limits
            )

    @contextlib.contextmanager
    def open(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        content: bytes | None = None,
        *,
        seconds: float,
        read_seconds: float | None = None,
    ) -> Iterator[Answer]:
        """Sends a request and gives its response, whose body can be read in the block. Raises exceptions in
        `HTTP_ERRORS`.

        path: URL path with its query, already quoted. seconds: time limit for connecting, and for each single read and
            write. read_seconds: another time limit for each read; None: `seconds`.
        """
        limits = {"connect": seconds, "read": read_seconds or seconds, "write": seconds, "pool": seconds}
        request = httpcore.Request(
            method=method,
            url=httpcore.URL(
                scheme=self._url.raw_scheme, host=self._url.raw_host, port=self._url.port,
                target=self._path + path.encode("ascii"),
            ),
            headers=[(b"Host", self._url.netloc), *((k.encode(), v.encode("latin-1")) for k, v in headers.items())],
            content=content,
            extensions={"timeout": limits},
        )  # fmt: skip
        with bounded_head():
            answer = self._pool.handle_request(request)
        try:
            yield Answer(answer)
        finally:
            answer.close()

    def close(self) -> None:
        self._pool.close()


def _proxy_for(url: httpx.URL) -> httpx.Proxy | None:
    """The proxy for this address by HTTP_PROXY, HTTPS_PROXY or ALL_PROXY; None without one, or if NO_PROXY excepts the
    host."""
    named = urllib.request.getproxies()
    proxy = named.get(url.scheme) or named.get("all")
    if not proxy or urllib.request.proxy_bypass(url.host):
        return None
    try:
        made = httpx.Proxy(proxy if "://" in proxy else f"http://{proxy}")
        if not made.url.host or not 0 < (made.url.port or 1) < 1 << 16:
            raise ValueError("no host, or an invalid port")
        return made
    except (httpx.InvalidURL, ValueError) as error:
        variable = f"{url.scheme}_proxy" if named.get(url.scheme) else "all_proxy"
        shown = visible(proxy.rpartition("@")[2])[:200]  # without the user name and password before the "@"
        raise DaemonError(
            f"The environment's {variable.upper()} names no proxy that can be used ({shown!r}): give it as "
            "http://host:port, or exclude the daemon's host from the proxy with NO_PROXY."
        ) from error


def system_trust() -> ssl.SSLContext:
    """A TLS context with the system's certificate authorities, or those of SSL_CERT_FILE and SSL_CERT_DIR."""
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        raise DaemonError(
            f"The system's certificates cannot be read: {error.strerror or error}. Check the "
            "environment variables SSL_CERT_FILE and SSL_CERT_DIR."
        ) from error
