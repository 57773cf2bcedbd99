"""Request guard of the live view: checks Host, Origin and session of every request, and sets the security headers.

A page of another site can make a browser send requests to the live view. With DNS rebinding it can even use its own
host name for them. A browser without a session gets the sign-in page only, and no WebSocket, which carries all data;
but if the live view is public (`PUBLIC_VARIABLE`), no session is needed.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import os
import re
import socket
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import streamlit
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidegate.dashboard import HEALTH_PATH, HOSTS_VARIABLE, OPEN_PATH, PUBLIC_VARIABLE, SIGN_IN_PATH
from tidegate.dashboard.server import sign_in
from tidegate.dashboard.session import browser_sessions

FREE: Final = (HEALTH_PATH, OPEN_PATH, SIGN_IN_PATH, "/favicon.png", "/favicon.ico")
"""URL paths that can be requested without a session."""
STATIC: Final = "/static/"
"""Path of Streamlit's own static files, which contain no data."""
POLICY_VIOLATION: Final = 1008
"""WebSocket close code that a browser gets when its session has ended."""
_NO_SESSION: Final = "This needs a session: open the live view in a browser, or see `tidegate dashboard --link`."
_INLINE: Final = re.compile(rb"<script>(.*?)</script>", re.DOTALL)


def _own_scripts() -> str:
    """The hashes of the inline scripts of Streamlit's page, for the Content-Security-Policy."""
    page = (Path(streamlit.__file__).parent / "static" / "index.html").read_bytes()
    hashes = (base64.b64encode(hashlib.sha256(script).digest()).decode() for script in _INLINE.findall(page))
    return " ".join(f"'sha256-{one}'" for one in hashes)


POLICY: Final = (
    f"default-src 'self'; script-src 'self' 'unsafe-eval' {_own_scripts()}; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; worker-src 'self' blob:; connect-src 'self'; "
    "object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'self'"
)
"""The Content-Security-Policy header: no page loads data from another host or sends data to it, whatever text the page
contains. 'unsafe-eval' is needed for the charts, whose JavaScript evaluates expressions that this server has made."""


class RequestGuard:
    """ASGI middleware in front of all routes of the live view."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        refusal = refused(Headers(scope=scope))
        if refusal is not None:
            await PlainTextResponse(refusal, 400)(scope, receive, send)
            return
        connection = HTTPConnection(scope)
        if not may_pass(connection):
            await _refusal(connection)(scope, receive, send)
            return

        async def receive_in_session() -> Message:
            message = await receive()
            if message["type"] == "websocket.receive" and not may_pass(connection):
                await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": "The session has ended."})
                return {"type": "websocket.disconnect", "code": POLICY_VIOLATION}
            return message

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("Content-Security-Policy", POLICY)
                headers.setdefault("X-Content-Type-Options", "nosniff")
                headers.setdefault("Referrer-Policy", "no-referrer")
            await send(message)

        await self._app(scope, receive_in_session, send_guarded)


def may_pass(connection: HTTPConnection) -> bool:
    """Whether the request is allowed: the live view is public, the path needs no session, or the request has one."""
    if os.environ.get(PUBLIC_VARIABLE) == "1":
        return True
    path = connection.scope["path"]
    if connection.scope["type"] == "http" and (path in FREE or path.startswith(STATIC)):
        return True
    return browser_sessions.find(connection.headers.get("host", ""), connection.cookies) is not None


def _refusal(connection: HTTPConnection) -> Response:
    """The response to a request without a session: the sign-in page for a page request, else 403."""
    if connection.scope["type"] == "http" and connection.scope["method"] in ("GET", "HEAD"):
        return sign_in.page(sign_in.wanted(connection))
    return PlainTextResponse(_NO_SESSION, 403)


def refused(headers: Headers) -> str | None:
    """The reason why a request with these headers is refused, as a sentence; None if it is accepted."""
    host, origin = headers.get("host", ""), headers.get("origin")
    name = hostname(host)
    if not is_ours(name):
        return f"This live view is not {name[:253]!r}. If it should be, start it with --allowed-host {name[:253]}."
    if origin is not None and origin.partition("://")[2].lower() != host.lower():
        return f"A page of {origin[:253]!r} may not use this live view."
    return None


def is_ours(name: str) -> bool:
    """Whether the live view accepts this host name: an IP address, a name of this machine, or a name in
    `HOSTS_VARIABLE`. An attacker could point any other DNS name to this machine."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        own = {"localhost", socket.gethostname().lower(), socket.getfqdn().lower()}
        allowed = {one.strip().lower() for one in os.environ.get(HOSTS_VARIABLE, "").split(",")}
        return bool(name) and (name in own or name in allowed or "*" in allowed)
    return True


def hostname(header: str) -> str:
    """The host part of `host`, `host:port`, `[v6]` or `[v6]:port`; empty for other forms."""
    try:
        return (urlsplit(f"//{header}").hostname or "").lower()
    except ValueError:
        return ""
