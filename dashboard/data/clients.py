"""The clients that this process reads the daemon with, one for each address and token, and what their errors mean."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from tidegate.client.daemon_client import DaemonClient, find_token
from tidegate.errors import DaemonError, NotAuthorized

TIMEOUT_SECONDS: Final = 3.0
CLIENTS_KEPT: Final = 8

_clients: OrderedDict[tuple[str, str | None], DaemonClient] = OrderedDict()
_lock = threading.Lock()


def reader(url: str) -> DaemonClient:
    """The client that this process reads with; not to be closed. One that is dropped is closed when nobody has it."""
    key = (url, find_token("read"))
    with _lock:
        found = _clients.get(key) or DaemonClient(*key, timeout=TIMEOUT_SECONDS)
        _clients[key] = found
        _clients.move_to_end(key)
        while len(_clients) > CLIENTS_KEPT:
            _clients.popitem(last=False)
    return found


def explain(error: DaemonError, url: str) -> str:
    """The error as a sentence for the viewer of a page."""
    if isinstance(error, NotAuthorized):
        return (
            f"The daemon at {url} does not accept this page's read token. Start the live view as the user who runs "
            "the daemon, or set TIDEGATE_READ_TOKEN."
        )
    return str(error) or f"The daemon at {url} answered with an error."


def forget() -> None:
    """Closes all clients."""
    with _lock:
        for client in _clients.values():
            client.close()
        _clients.clear()
