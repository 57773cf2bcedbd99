"""Limits on connections: how many may be open, and the time in which a client must send a valid token.

File descriptors are divided into three parts: `OWN_DESCRIPTORS` for the daemon itself; at most `unauthorized_limit`
connections without a valid token; and the rest, at least three quarters, for connections with a valid token. A new
connection is always accepted. If there are then too many connections without a valid token, the daemon closes one: the
oldest connection of the address (IPv6: the /64 network) that has the most of them. So a client that opens many
connections only displaces its own connections. A connection counts as one without a valid token only until the first
request with a valid token has arrived on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import resource
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

Reason = Literal["deadline", "evicted", "too-large", "invalid", "full", "descriptors"]
WHY: Final[dict[Reason, str]] = {
    "deadline": "sent no request with a valid token in time",
    "evicted": "closed for newer connections",
    "too-large": "sent headers above the limit",
    "invalid": "sent an invalid HTTP request",
    "full": "had a valid token, but the limit of connections was reached",
    "descriptors": "waited because no file descriptor was free",
}
OWN_DESCRIPTORS: Final = 128
"""File descriptors reserved for the database, its log, the listening socket and files."""
MAX_UNAUTHORIZED: Final = 1_024
"""Upper bound for the limit on open connections without a valid token."""
MIN_CONNECTIONS: Final = 16
"""Minimum of each limit on the number of connections, even if fewer file descriptors are available."""
LOG_SECONDS: Final = 60.0
"""Shortest time between two log lines about refused connections, in seconds."""
REQUEST_SECONDS: Final = 75.0
"""Longest time to receive a request on a connection with a valid token."""
log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Connection:
    """One accepted connection. `authorized`: a request with a valid token was received on it."""

    _limiter: ConnectionLimiter
    address: str
    close: Callable[[Reason], object]
    authorized: bool = False
    gone: bool = False
    incomplete: bool = False
    """Whether a request is being received."""
    served: bool = False
    """Whether at least one response was sent."""
    _timer: asyncio.TimerHandle | None = None

    def authorize(self) -> bool:
        """Counts the connection as one with a valid token. At the limit it returns False and changes nothing."""
        return self._limiter.authorize(self)

    def arm(self, seconds: float, on_timeout: Callable[[Connection], None]) -> None:
        """Starts the timer: calls `on_timeout` after this time. A timer that was armed before is cancelled."""
        self.disarm()
        with contextlib.suppress(RuntimeError):  # without a running event loop there is no timer
            self._timer = asyncio.get_running_loop().call_later(seconds, on_timeout, self)

    def disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def armed(self) -> bool:
        return self._timer is not None


class ConnectionLimiter:
    """Counts the connections of a server. Closes connections above the limits, and connections that are too slow.

    count: callback, called with the reason of each refusal. seconds: time limit for a client to send a request with a
    valid token, TLS handshake included. descriptors: maximum number of open file descriptors of this process.
    """

    def __init__(self, count: Callable[[Reason], object], *, seconds: float, descriptors: int) -> None:
        self.seconds = seconds
        self.capacity = max(MIN_CONNECTIONS, descriptors - OWN_DESCRIPTORS)
        self.unauthorized_limit = max(MIN_CONNECTIONS, min(MAX_UNAUTHORIZED, self.capacity // 4))
        self.unauthorized = 0
        self.authorized = 0
        self._count = count
        self._by_network: dict[str, dict[Connection, None]] = {}
        self._unlogged: Counter[Reason] = Counter()
        self._unlogged_addresses: Counter[str] = Counter()
        self._logged_at = -LOG_SECONDS

    def register(self, address: str, close: Callable[[Reason], object]) -> Connection:
        """Registers a new connection; may close another connection to stay within the limit.

        address: IP address of the client. close: function that closes the connection; it gets the reason.
        """
        connection = Connection(self, address, close)
        self._by_network.setdefault(network_of(address), {})[connection] = None
        self.unauthorized += 1
        connection.arm(self.seconds, self._on_timeout)
        if self.unauthorized > max(MIN_CONNECTIONS, min(self.unauthorized_limit, self.capacity - self.authorized)):
            self.evict()
        return connection

    def authorize(self, connection: Connection) -> bool:
        """Counts the connection as one with a valid token. At the limit it returns False and changes nothing."""
        if connection.authorized or connection.gone:  # the client may have disconnected during its request
            return True
        if self.authorized >= self.capacity:
            self.refuse("full", connection.address)
            return False
        self._forget(connection)
        self.authorized += 1
        connection.authorized = True
        self.progress(connection)
        return True

    def unregister(self, connection: Connection) -> None:
        """Removes a connection that is closed or about to be closed. Idempotent."""
        if not connection.gone:
            connection.gone = True
            self._forget(connection)

    def progress(self, connection: Connection) -> None:
        """Handles received data: on a connection with a valid token, starts the timer for a request that is not
        complete yet, and stops it when the request is complete."""
        if not connection.authorized:
            return
        if not connection.incomplete:
            connection.disarm()
        elif not connection.armed:
            connection.arm(REQUEST_SECONDS, self._on_timeout)

    def answered(self, connection: Connection) -> None:
        """Handles a sent response. On a connection without a valid token, starts the time limit for the next request,
        and makes the connection the newest of its network (of a network, the oldest is closed first)."""
        connection.served = True
        if not (connection.authorized or connection.gone):
            of_network = self._by_network[network_of(connection.address)]
            of_network[connection] = of_network.pop(connection)  # the newest
            connection.arm(self.seconds, self._on_timeout)

    def evict(self) -> None:
        """Closes the oldest connection of the network that has the most connections without a valid token."""
        if self._by_network:
            most = max(self._by_network, key=lambda network: len(self._by_network[network]))
            self._close(next(iter(self._by_network[most])), "evicted")

    def refuse(self, reason: Reason, address: str) -> None:
        """Counts a refusal; logs the refusals since the last log line, at most once a minute."""
        self._count(reason)
        self._unlogged[reason] += 1
        self._unlogged_addresses[address] += 1
        now = time.monotonic()
        if now - self._logged_at < LOG_SECONDS:
            return
        self._logged_at = now
        what = ", ".join(f"{count} {WHY[why]}" for why, count in self._unlogged.most_common())
        whose = ", ".join(address for address, _ in self._unlogged_addresses.most_common(3))
        log.warning(
            "refused connections since the last such message: %s; most of them from %s. Open connections now: %d "
            "without a valid token (limit %d), %d with a valid token (limit %d). This message comes at most once a "
            "minute; tidegate_refused_connections_total counts all refusals",
            what, whose, self.unauthorized, self.unauthorized_limit, self.authorized, self.capacity,
        )  # fmt: skip
        self._unlogged.clear()
        self._unlogged_addresses.clear()

    def _forget(self, connection: Connection) -> None:
        connection.disarm()
        if connection.authorized:
            self.authorized -= 1
            return
        self.unauthorized -= 1
        network = network_of(connection.address)
        of_network = self._by_network[network]
        del of_network[connection]
        if not of_network:
            del self._by_network[network]

    def _on_timeout(self, connection: Connection) -> None:
        if connection.served and not connection.incomplete:  # an idle connection that was used is no refusal
            self.unregister(connection)
            connection.close("deadline")
        else:
            self._close(connection, "deadline")

    def _close(self, connection: Connection, reason: Reason) -> None:
        self.unregister(connection)
        connection.close(reason)
        self.refuse(reason, connection.address)


def network_of(address: str) -> str:
    """The addresses that one client may use, as a key: the IPv4 address itself, or the IPv6 /64 network."""
    if ":" not in address:
        return address
    try:
        found = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    return str(found.ipv4_mapped or ipaddress.IPv6Network((int(found) >> 64 << 64, 64)))


def raise_descriptor_limit() -> None:
    """Raises the soft limit of open file descriptors to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # some systems refuse the hard limit that they report
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def descriptor_limit() -> int:
    """The number of file descriptors that this process may have open at the same time."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft
