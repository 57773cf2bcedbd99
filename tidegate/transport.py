"""HTTP for httpx over connections that end in time (`tidegate.streams`), through the environment's proxy."""

from __future__ import annotations

import contextlib
import ssl
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpcore

from tidegate.errors import DaemonError
from tidegate.streams import Backend, bounded_framing, bounded_head
from tidegate.terminal import visible
from tidegate.undrawn import httpx


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
        limits: dict[str, Any] = {"ssl_context": trust, "keepalive_expiry": 30.0, "network_backend": Backend(check)}
        proxy = None if direct else _proxy_for(url)
        if proxy is None:
            self._pool = httpcore.ConnectionPool(**limits)
        elif proxy.url.scheme.startswith("socks"):
            try:
                self._pool = httpcore.SOCKSProxy(str(proxy.url), proxy_auth=proxy.raw_auth, **limits)
            except RuntimeError as error:
                raise DaemonError(
                    f"The proxy {proxy.url} in the environment speaks SOCKS, for which the package socksio is needed: "
                    "install it, or except the daemon's host with NO_PROXY."
                ) from error
        else:
            # A proxy is trusted as the system says: TIDEGATE_CA_FILE is about the daemon.
            outer = system_trust() if proxy.url.scheme == "https" else None
            self._pool = httpcore.HTTPProxy(
                str(proxy.url), proxy_auth=proxy.raw_auth, proxy_ssl_context=outer, **limits
            )

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
        with _as_httpx(), bounded_head():
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
            yield from bounded_framing(self._stream)

    def close(self) -> None:
        close = getattr(self._stream, "close", None)
        if close is not None:
            close()


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
    try:
        made = httpx.Proxy(proxy if "://" in proxy else f"http://{proxy}")
        if not made.url.host or not 0 < (made.url.port or 1) < 1 << 16:
            raise ValueError("no host, or no port that can be")
        return made
    except (httpx.InvalidURL, ValueError) as error:
        variable = f"{url.scheme}_proxy" if named.get(url.scheme) else "all_proxy"
        shown = visible(proxy.rpartition("@")[2])[:200]  # a name and a password may come before
        raise DaemonError(
            f"The environment's {variable.upper()} names no proxy that can be used ({shown!r}): give it as "
            "http://host:port, or except the daemon's host with NO_PROXY."
        ) from error


def system_trust() -> ssl.SSLContext:
    """Whom the system trusts, or SSL_CERT_FILE and SSL_CERT_DIR say."""
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        raise DaemonError(
            f"The system's certificates cannot be read: {error.strerror or error}. Look at SSL_CERT_FILE and "
            "SSL_CERT_DIR."
        ) from error
