"""What every request passes before a route sees it: Host, origin, token, size of the body. Closed by default."""

from __future__ import annotations

import logging
import re
from typing import Final

from starlette.datastructures import Headers
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidegate.daemon.configuration.settings import Settings
from tidegate.daemon.problems import RETRY_SECONDS, problem
from tidegate.daemon.security.connections import Connection
from tidegate.daemon.security.failure_limiter import Failures
from tidegate.daemon.security.scopes import Asked, Declared
from tidegate.daemon.security.tokens import Caller, Tokens, bearer
from tidegate.daemon.storage.token_table import digest_of

CHALLENGE = {"WWW-Authenticate": 'Bearer realm="tidegate"'}
REFUSALS = {
    "wrong": "The daemon does not know this token.",
    "expired": "The token has expired: ask for a new one.",
    "revoked": "The token was withdrawn: ask for a new one.",
}
OPEN_BODY_BYTES: Final = 65_536
"""Of a request that needs no token."""
TOO_MANY: Final = (
    "All connections that the daemon's limit of descriptors allows are in use: raise it (ulimit -n, LimitNOFILE)."
)
AUTHORITY: Final = "authority"
"""In a request's state: the host in its target, where that is a whole address (`GET http://host/path`)."""
_HOST: Final = re.compile(
    r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]{2,45})\]|(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9_.])?))(?::[0-9]*)?"
)
"""A Host header that can be meant: a name or an address, with or without a port."""
_OWN_NAME: Final = "tidegate.own_name"
log = logging.getLogger(__name__)


class Gate:
    """ASGI middleware. The caller, when there is one, is at `request.state.caller`."""

    def __init__(self, app: ASGIApp, *, tokens: Tokens, declared: Declared, settings: Settings) -> None:
        self._app = app
        self._tokens = tokens
        self._declared = declared
        names = [f"[{host}]" if ":" in host else host for host in sorted(settings.hosts)]
        self._trusted_host = TrustedHostMiddleware(_has_own_name, names, www_redirect=False)
        self._max_body_bytes = settings.max_body_bytes
        self._failures = Failures(settings.forgiven_failures)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        asked = self._declared.of(scope)
        answer = await self._wrong_place(scope, asked, headers)
        caller = None
        if answer is None and not asked.open:
            answer, caller = self._authorize(scope, asked, headers.get("authorization", ""))
        state = scope.setdefault("state", {})
        connection: Connection | None = state.get("connection")
        if caller is not None and connection is not None and not connection.authorize():
            more = {"Retry-After": RETRY_SECONDS, "Connection": "close"}
            answer = problem(503, "too-many-connections", TOO_MANY, more)
        if answer is not None:
            await answer(scope, receive, send)
            return
        state["caller"] = caller
        most = self._max_body_bytes if caller is not None else min(self._max_body_bytes, OPEN_BODY_BYTES)
        body = await self._read(headers, receive, most)
        if body is None:
            detail = f"The body is larger than the {most} bytes that the daemon takes here."
            await problem(413, "too-large", detail, headers={"Connection": "close"})(scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)

    async def _wrong_place(self, scope: Scope, asked: Asked, headers: Headers) -> Response | None:
        """Refuses what a web page can make a browser send: another Host (DNS rebinding), another origin. And what a
        proxy may take for a request to somebody else: several hosts (RFC 9112, 3.2)."""
        origin = headers.get("origin")
        if len(headers.getlist("host")) > 1:
            return problem(400, "wrong-host", "The request has several Host headers: send one.")
        hosts = [] if asked.by_any_name and origin is None else [headers.get("host", "")]
        if (authority := scope.get("state", {}).get(AUTHORITY)) is not None:
            hosts = [headers.get("host", ""), authority]
        for host in hosts:
            if not await self._is_own_name(scope, host):
                return problem(400, "wrong-host", _not_the_daemon(host))
        if origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower():
            return problem(403, "cross-origin", "The daemon answers no web page of another origin.")
        return None

    async def _is_own_name(self, scope: Scope, host: str) -> bool:
        """What starlette says of such a Host header; its answer in plain text is not sent."""
        seen = {**scope, "headers": [(b"host", host.encode("latin-1"))]}
        await self._trusted_host(seen, _nothing_comes, _not_sent)
        return _OWN_NAME in seen

    def _authorize(self, scope: Scope, asked: Asked, header: str) -> tuple[Response | None, Caller | None]:
        token = bearer(header)
        if not token:
            # Nothing was tried: a page that is opened by hand is no attack.
            return problem(401, "no-token", "A token is needed: send `Authorization: Bearer …`.", CHALLENGE), None
        caller = self._tokens.check(token)
        if isinstance(caller, str):
            return self._refuse(scope, token, 401, f"{caller}-token", REFUSALS[caller]), None
        if not asked.grants(caller.scope):
            what = f"{scope['method']} {scope['path']}"
            detail = f"The token has scope {caller.scope}; {what} needs {asked.needed}."
            return self._refuse(scope, token, 403, "wrong-scope", detail), None
        if not asked.opens(caller):
            return self._refuse(scope, token, 403, "wrong-run", f"The token opens run {caller.run!r} only."), None
        return None, caller

    def _refuse(self, scope: Scope, token: str, status: int, type: str, detail: str) -> Response:
        """A token that opens nothing counts against its address, too; one that opens something else only by itself."""
        address = str((scope.get("client") or ("unknown",))[0])
        keys = [f"token {digest_of(token)}", *([f"address {address}"] if status == 401 else [])]
        if wait := self._failures.note(*keys):
            detail = f"Too many refused requests: wait {wait} s."
            return problem(429, "too-many-failures", detail, {"Retry-After": str(wait)})
        log.warning("refused %s %r from %s: %s", scope["method"], scope["path"][:200], address, type)
        return problem(status, type, detail, CHALLENGE if status == 401 else None)

    async def _read(self, headers: Headers, receive: Receive, most: int) -> bytes | None:
        """The whole body; None when it is too large, told before it is read where the length is known, and when the
        client goes before its end: half a request is none."""
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > most:
            return None
        body = bytearray()
        if length == "0" and "transfer-encoding" not in headers:
            return bytes(body)
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > most or message["type"] == "http.disconnect":
                return None
        return bytes(body)


async def _has_own_name(scope: Scope, receive: Receive, send: Send) -> None:
    """The application that starlette guards: it is reached by one of the daemon's names."""
    scope[_OWN_NAME] = True


async def _nothing_comes() -> Message:
    return {"type": "http.disconnect"}


async def _not_sent(message: Message) -> None:
    """Takes what the daemon says in its own form."""


def _replay(body: bytes, receive: Receive) -> Receive:
    """A channel that gives the body once, then what the client does."""
    given = False

    async def again() -> Message:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return again


def _not_the_daemon(host: str) -> str:
    """What a Host header is told that names another host, or none."""
    if (found := _HOST.fullmatch(host)) is None:
        return f"The host {host[:253]!r} is no name of this daemon: send the name or address by which it is reached."
    name = (found["ipv6"] or found["name"]).lower()
    return f"This daemon is not {name!r}. If it should be, start it with --allowed-host {name}."
