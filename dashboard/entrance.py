"""The way in by a one-time code: `/open?code=…` gives this browser the operate scope, as a cookie that says nothing.

The cookie holds a random name; which token it stands for is in this process's memory only. Cookies are the same on all
ports of a host, and Streamlit answers pages of other ports: so a page of another origin has no token.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

import streamlit as st
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from tidegate.client import find_token
from tidegate.dashboard import OPEN_PATH, codes

LIFE_SECONDS: Final = 12 * 3_600.0
KEPT: Final = 64
"""Browsers; the one that came first goes first."""
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}
_REFUSED: Final = (
    "This link was used before, or is older than 10 minutes. <code>tidegate dashboard --link</code> prints another one."
)
_NO_TOKEN: Final = (
    "The live view finds no operate token where it runs. Paste the token into the page Tune: the daemon writes it to "
    "<code>operate.token</code> in its state directory."
)
_sessions: OrderedDict[str, tuple[str, float]] = OrderedDict()
"""Operate token and end, by the digest of the cookie's value."""
_lock = threading.Lock()


async def enter(request: Request) -> Response:
    """Exchanges the code for a cookie and goes on to the first page, whose address has no code."""
    if request.method != "GET":
        return Response(headers=_HEADERS)  # programs that look at links do not use them up
    token = find_token("operate")
    if token is None:
        return _sentence(_NO_TOKEN)
    if not codes.redeem(request.query_params.get("code", "")):
        return _sentence(_REFUSED)
    answer = RedirectResponse("/", 303, headers=_HEADERS)
    answer.set_cookie(
        cookie_name(request.headers.get("host", "")), _begin(token), httponly=True, samesite="strict",
        secure=request.url.scheme == "https",
    )  # fmt: skip
    return answer


ROUTE: Final = Route(OPEN_PATH, enter, methods=["GET"])


def token() -> str:
    """The operate token of the viewer's browser; empty where it has none."""
    if (found := _session()) is None:
        return ""
    with _lock:
        given, ends_at = _sessions.get(found, ("", 0.0))
    return given if time.time() < ends_at else ""


def leave() -> None:
    """Takes the scope from the viewer's browser, in all its tabs."""
    if (found := _session()) is not None:
        with _lock:
            _sessions.pop(found, None)


def cookie_name(host: str) -> str:
    """Of the live view at this Host: several on one machine do not take each other's."""
    port = urlsplit(f"//{host}").port
    return f"tidegate-{port}" if port else "tidegate"


def same_origin(headers: Mapping[str, str]) -> bool:
    """Whether it is our own page that speaks."""
    host = headers.get("host", "").lower()
    return bool(host) and urlsplit(headers.get("origin", "")).netloc.lower() == host


def _begin(token: str) -> str:
    """A new session; its cookie's value."""
    value = secrets.token_urlsafe(32)
    with _lock:
        _sessions[_digest(value)] = (token, time.time() + LIFE_SECONDS)
        while len(_sessions) > KEPT:
            _sessions.popitem(last=False)
    return value


def _session() -> str | None:
    """The key of the viewer's session, where the request has one."""
    headers = {name.lower(): value for name, value in st.context.headers.items()}
    if not same_origin(headers):
        return None
    value = st.context.cookies.get(cookie_name(headers.get("host", "")))
    return _digest(value) if value else None


def _digest(value: str) -> str:
    return hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()


def _sentence(sentence: str) -> Response:
    body = (
        f'<!doctype html><meta charset="utf-8"><title>Tidegate</title><p>{sentence}</p><p><a href="/">Look on</a></p>'
    )
    return HTMLResponse(body, 403, headers=_HEADERS)
