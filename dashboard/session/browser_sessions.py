"""Sessions of browsers: which of them may look, and which may turn knobs.

A session's cookie holds a random name and nothing else; what it stands for is in this process's memory only. Cookies
are the same on all ports of a host, so a request that turns knobs must come from a page of ours, too.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

LIFE_SECONDS: Final = 12 * 3_600.0
KEPT: Final = 256
"""Browsers; the one that came first goes first."""


@dataclass(frozen=True, slots=True)
class Session:
    """What one browser may do, until `ends_at`. `operate`: the operate token; empty where it may only look."""

    operate: str
    ends_at: float


_sessions: OrderedDict[str, Session] = OrderedDict()
"""By the digest of the cookie's value."""
_lock = threading.Lock()


def begin(operate: str = "") -> str:
    """Begins a session; its cookie's value."""
    value = secrets.token_urlsafe(32)
    with _lock:
        _sessions[_digest(value)] = Session(operate, time.time() + LIFE_SECONDS)
        while len(_sessions) > KEPT:
            _sessions.popitem(last=False)
    return value


def find(host: str, cookies: Mapping[str, str]) -> Session | None:
    """The session of a request to the live view at this Host; None where it has none, or one that has ended."""
    key = _key(host, cookies)
    with _lock:
        found = _sessions.get(key)
        if found is not None and time.time() >= found.ends_at:
            del _sessions[key]
            return None
    return found


def only_look(host: str, cookies: Mapping[str, str]) -> None:
    """Takes the operate scope from the browser, in all its tabs."""
    key = _key(host, cookies)
    with _lock:
        if (found := _sessions.get(key)) is not None:
            _sessions[key] = Session("", found.ends_at)


def forget() -> None:
    """Ends all sessions."""
    with _lock:
        _sessions.clear()


def cookie_name(host: str) -> str:
    """Of the live view at this Host: several on one machine do not take each other's."""
    try:
        port = urlsplit(f"//{host}").port
    except ValueError:  # no port has this number
        port = None
    return f"tidegate-{port}" if port else "tidegate"


def same_origin(headers: Mapping[str, str]) -> bool:
    """Whether it is our own page that speaks. Names of headers are lower case."""
    host = headers.get("host", "").lower()
    return bool(host) and urlsplit(headers.get("origin", "")).netloc.lower() == host


def _key(host: str, cookies: Mapping[str, str]) -> str:
    return _digest(cookies.get(cookie_name(host), ""))


def _digest(value: str) -> str:
    return hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()
