"""Browser sessions: read-only, or with the operate scope for changes of knobs.

A session's cookie holds a random id only; the session itself is in this process's memory. A browser sends cookies to
all ports of a host, so a request that changes knobs must also come from a page of the live view (same origin).
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from cachetools import TLRUCache

from tidegate.dashboard.session.one_time_codes import digest

LIFE_SECONDS: Final = 12 * 3_600.0
SESSIONS_KEPT: Final = 256
"""Largest number of sessions in memory; the least recently used is dropped first."""


@dataclass(frozen=True, slots=True)
class Session:
    """A browser's session. `operate`: its operate token, empty if read-only; `ends_at`: seconds since the epoch."""

    operate: str
    ends_at: float


_sessions: TLRUCache[str, Session] = TLRUCache(
    SESSIONS_KEPT, ttu=lambda _, session, __: session.ends_at, timer=lambda: time.time()
)
"""Sessions by the digest of the cookie's value."""
_lock = threading.Lock()


def begin(operate: str = "") -> str:
    """Begins a session; returns the value of its cookie."""
    value = secrets.token_urlsafe(32)
    with _lock:
        _sessions[digest(value)] = Session(operate, time.time() + LIFE_SECONDS)
    return value


def find(host: str, cookies: Mapping[str, str]) -> Session | None:
    """The session of a request with this Host header; None if there is none, or it has ended."""
    with _lock:
        return _sessions.get(_key(host, cookies))


def make_read_only(host: str, cookies: Mapping[str, str]) -> None:
    """Makes the browser's session read-only, in all its tabs."""
    key = _key(host, cookies)
    with _lock:
        if (session := _sessions.get(key)) is not None:
            _sessions[key] = Session("", session.ends_at)


def cookie_name(host: str) -> str:
    """The cookie's name. It has the port of the Host header: live views on several ports have separate cookies."""
    try:
        port = urlsplit(f"//{host}").port
    except ValueError:  # an invalid port number
        port = None
    return f"tidegate-{port}" if port else "tidegate"


def same_origin(headers: Mapping[str, str]) -> bool:
    """Whether a request comes from a page of the live view itself. Header names are lower case."""
    host = headers.get("host", "").lower()
    return bool(host) and urlsplit(headers.get("origin", "")).netloc.lower() == host


def _key(host: str, cookies: Mapping[str, str]) -> str:
    return digest(cookies.get(cookie_name(host), ""))
