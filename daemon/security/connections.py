"""The daemon's connections: how many there may be, and how long each has to show a valid token.

Descriptors are divided into three parts: `OWN_DESCRIPTORS` for the daemon itself, at most `unauthorized_limit`
connections on which no valid token was shown, and the rest, at least three quarters, for those on which one was. A new
connection is always accepted: where there are too many without a token, the address (IPv6: the /64 network) that has
most of them loses its oldest. Whoever opens many displaces his own, and a client that sends its request at once needs
only as long as the request is on its way.
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
from typing import Final, Literal

Reason = Literal["deadline", "evicted", "too-large", "invalid", "full", "descriptors"]
WHY: Final[dict[Reason, str]] = {
    "deadline": "sent no request with a valid token in time",
    "evicted": "made room for newer ones",
    "too-large": "sent headers above the bound",
    "invalid": "sent what is no HTTP",
    "full": "had a valid token, but all places were taken",
    "descriptors": "waited since there was no free descriptor",
}
OWN_DESCRIPTORS: Final = 128
"""For the database, its log, the listener, files."""
MOST_UNAUTHORIZED: Final = 1_024
FEWEST: Final = 16
LOG_SECONDS: Final = 60.0
REQUEST_SECONDS: Final = 75.0
"""How long a request may take to come in once the connection has shown a valid token."""
log = logging.getLogger(__name__)


class Connection:
    """One connection, from its being accepted on. `authorized`: a valid token was shown on it."""

    __slots__ = ("_book", "_timer", "address", "authorized", "close", "gone", "incomplete", "served")

    def __init__(self, book: Connections, address: str, close: Callable[[Reason], object]) -> None:
        self._book = book
        self.address = address
        self.close = close
        self.authorized = False
        self.gone = False
        self.incomplete = False
        """A request has begun to come in."""
        self.served = False
        """An answer was given."""
        self._timer: asyncio.TimerHandle | None = None

    def authorize(self) -> bool:
        """A valid token was shown on it. False where all places are taken; it then stays what it was."""
        return self._book.authorize(self)

    def arm(self, seconds: float, late: Callable[[Connection], None]) -> None:
        """Calls `late` after that time, instead of whatever was armed before."""
        self.disarm()
        with contextlib.suppress(RuntimeError):  # no loop: nothing waits
            self._timer = asyncio.get_running_loop().call_later(seconds, late, self)

    def disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def armed(self) -> bool:
        return self._timer is not None


class Connections:
    """All connections of a server. `count` is told each refusal; `seconds`: the time for a request with a valid token,
    TLS handshake included; `descriptors`: how many this process may have."""

    def __init__(self, count: Callable[[Reason], object], *, seconds: float, descriptors: int) -> None:
        self.seconds = seconds
        self.capacity = max(FEWEST, descriptors - OWN_DESCRIPTORS)
        self.unauthorized_limit = max(FEWEST, min(MOST_UNAUTHORIZED, self.capacity // 4))
        self.unauthorized = 0
        self.authorized = 0
        self._count = count
        self._by_network: dict[str, dict[Connection, None]] = {}
        self._untold: Counter[Reason] = Counter()
        self._untold_addresses: Counter[str] = Counter()
        self._told_at = -LOG_SECONDS

    def admit(self, address: str, close: Callable[[Reason], object]) -> Connection:
        """A new connection; another one may have to go for it."""
        connection = Connection(self, address, close)
        self._by_network.setdefault(network_of(address), {})[connection] = None
        self.unauthorized += 1
        connection.arm(self.seconds, self._late)
        if self.unauthorized > max(FEWEST, min(self.unauthorized_limit, self.capacity - self.authorized)):
            self.evict()
        return connection

    def authorize(self, connection: Connection) -> bool:
        """See `Connection.authorize`."""
        if connection.authorized or connection.gone:  # an answer may be made for a client that has gone
            return True
        if self.authorized >= self.capacity:
            self.refuse("full", connection.address)
            return False
        self._forget(connection)
        self.authorized += 1
        connection.authorized = True
        self.progress(connection)
        return True

    def leave(self, connection: Connection) -> None:
        """It is closed, or about to be. Saying it again is fine."""
        if not connection.gone:
            connection.gone = True
            self._forget(connection)

    def progress(self, connection: Connection) -> None:
        """Something came in on a connection with a valid token: what has begun has to end."""
        if not connection.authorized:
            return
        if not connection.incomplete:
            connection.disarm()
        elif not connection.armed:
            connection.arm(REQUEST_SECONDS, self._late)

    def answered(self, connection: Connection) -> None:
        """An answer was given: without a valid token the time for the next request begins."""
        connection.served = True
        if not (connection.authorized or connection.gone):
            of_network = self._by_network[network_of(connection.address)]
            of_network[connection] = of_network.pop(connection)  # the newest
            connection.arm(self.seconds, self._late)

    def evict(self) -> None:
        """Closes the oldest connection of the network that has most of those without a valid token."""
        if self._by_network:
            most = max(self._by_network, key=lambda network: len(self._by_network[network]))
            self._close(next(iter(self._by_network[most])), "evicted")

    def refuse(self, reason: Reason, address: str) -> None:
        """Counts a refusal, and tells of it in the log, at most once a minute."""
        self._count(reason)
        self._untold[reason] += 1
        self._untold_addresses[address] += 1
        now = time.monotonic()
        if now - self._told_at < LOG_SECONDS:
            return
        self._told_at = now
        what = ", ".join(f"{count} {WHY[why]}" for why, count in self._untold.most_common())
        whose = ", ".join(address for address, _ in self._untold_addresses.most_common(3))
        log.warning(
            "refused connections: %s; most from %s. Without a valid token there are %d (at most %d), with one %d (at "
            "most %d). More are counted in tidegate_refused_connections_total, and told here once a minute",
            what, whose, self.unauthorized, self.unauthorized_limit, self.authorized, self.capacity,
        )  # fmt: skip
        self._untold.clear()
        self._untold_addresses.clear()

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

    def _late(self, connection: Connection) -> None:
        if connection.served and not connection.incomplete:  # it is idle, and was of use
            self.leave(connection)
            connection.close("deadline")
        else:
            self._close(connection, "deadline")

    def _close(self, connection: Connection, reason: Reason) -> None:
        self.leave(connection)
        connection.close(reason)
        self.refuse(reason, connection.address)


def network_of(address: str) -> str:
    """What one client has at its disposal: an IPv4 address, an IPv6 network of 64 bits."""
    if ":" not in address:
        return address
    try:
        found = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    return str(found.ipv4_mapped or ipaddress.IPv6Network((int(found) >> 64 << 64, 64)))


def raise_descriptor_limit() -> None:
    """As many descriptors as this process may have without asking anybody."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # some systems refuse what they say to allow
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def descriptor_limit() -> int:
    """How many descriptors this process may have at a time."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft
