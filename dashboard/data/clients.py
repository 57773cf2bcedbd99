"""Daemon clients for reading, one for each address and token, and the texts that pages show for their errors."""

from __future__ import annotations

import threading
from typing import Final

from cachetools import LRUCache, cached

from tidegate.client.daemon_client import DaemonClient
from tidegate.client.discovery import find_token
from tidegate.errors import DaemonError, NotAuthorized

TIMEOUT_SECONDS: Final = 3.0
CLIENTS_KEPT: Final = 8


@cached(LRUCache(CLIENTS_KEPT), lock=threading.Lock())
def _client(url: str, token: str | None) -> DaemonClient:
    return DaemonClient(url, token, timeout=TIMEOUT_SECONDS)


def shared_client(url: str) -> DaemonClient:
    """The shared client for the daemon at `url`. Callers must not close it: a client that has left the cache is closed
    when nobody uses it any more."""
    return _client(url, find_token("read"))


def explain(error: DaemonError, url: str) -> str:
    """The error as a sentence for a page's viewer."""
    if isinstance(error, NotAuthorized):
        return (
            f"The daemon at {url} does not accept this page's read token. Start the live view as the user who runs "
            "the daemon, or set TIDEGATE_READ_TOKEN."
        )
    return str(error) or f"The daemon at {url} answered with an error."
