"""Security middleware: checks Host, Origin, token and body size of every request before a route sees it.

A request is refused unless its route declares that it may pass (see `scopes.py`).
"""

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
from tidegate.daemon.security.failure_limiter import FailureLimiter
from tidegate.daemon.security.refused_agents import RefusedAgentsBook
from tidegate.daemon.security.scopes import RouteRequirement, RouteRequirements
from tidegate.daemon.security.tokens import Caller, Tokens, bearer
from tidegate.daemon.storage.token_table import digest_of
from tidegate.wire.agent import AgentRefusal

CHALLENGE = {"WWW-Authenticate": 'Bearer realm="tidegate"'}
AGENTS: Final = "/v1/agents"
"""Beginning of the paths that agents use."""
REFUSALS = {
    "no": "A token is needed: send `Authorization: Bearer …`.",
    "wrong": "The daemon does not know this token.",
    "expired": "The token has expired: ask for a new one.",
    "revoked": "The token was revoked: ask for a new one.",
}
OPEN_BODY_BYTES: Final = 65_536
"""Largest body of a request that needs no token."""
MAX_OWN_NAMES: Final = 64
"""Largest number of entries in the cache of accepted Host headers. If a wildcard is allowed, clients can send any
number of different headers that are accepted."""
TOO_MANY: Final = (
    "All connections that the daemon's limit of descriptors allows are in use: raise it (ulimit -n, LimitNOFILE)."
)
AUTHORITY: Final = "authority"
"""Key in a request's state: the host in the request target, where the target is a full URL (`GET http://host/path`)."""
MATCH: Final = "match"
"""Key in a request's state: the `RouteMatch` of the request."""
_HOST: Final = re.compile(
    r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]{2,45})\]|(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9_.])?))(?::[0-9]*)?"
)
"""Pattern of a valid Host header: a name or an address, with or without a port."""
_OWN_NAME: Final = "tidegate.own_name"
log = logging.getLogger(__name__)


class SecurityMiddleware:
    """ASGI middleware that authorizes requests.

    `request.state.caller` is the authenticated caller, or None; `request.state.match` is the request's `RouteMatch`.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        tokens: Tokens,
        requirements: RouteRequirements,
        settings: Settings,
        refused_agents: RefusedAgentsBook,
    ) -> None:
        self._app = app
        self._tokens = tokens
        self._refused_agents = refused_agents
        self._requirements = requirements
        names = [f"[{host}]" if ":" in host else host for host in sorted(settings.hosts)]
        self._trusted_host = TrustedHostMiddleware(_has_own_name, names, www_redirect=False)
        self._own_names = set[str]()
        """Host headers that were accepted before, at most `MAX_OWN_NAMES`."""
        self._max_body_bytes = settings.max_body_bytes
        self._failures = FailureLimiter(settings.forgiven_failures)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        requirement = (match := self._requirements.match(scope)).requirement
        answer = await self._check_host_and_origin(scope, requirement, headers)
        caller = None
        if answer is None and not requirement.open:
            answer, caller = self._authorize(scope, requirement, headers.get("authorization", ""))
        state = scope.setdefault("state", {})
        connection: Connection | None = state.get("connection")
        if caller is not None and connection is not None and not connection.authorize():
            more = {"Retry-After": RETRY_SECONDS, "Connection": "close"}
            answer = problem(503, "too-many-connections", TOO_MANY, more)
        if answer is not None:
            await answer(scope, receive, send)
            return
        state["caller"], state[MATCH] = caller, match
        most = self._max_body_bytes if caller is not None else min(self._max_body_bytes, OPEN_BODY_BYTES)
        body = await self._read(headers, receive, most)
        if body is None:
            detail = f"The body is larger than the {most} bytes that the daemon takes here."
            await problem(413, "too-large", detail, headers={"Connection": "close"})(scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)

    async def _check_host_and_origin(
        self, scope: Scope, requirement: RouteRequirement, headers: Headers
    ) -> Response | None:
        """The refusal of a request with a wrong Host or Origin header; None where both are right.

        A web page can make a browser send another Host (DNS rebinding) or another Origin. A request with several Host
        headers is refused because a proxy may read it as a request to another host (RFC 9112, 3.2).
        """
        origin = headers.get("origin")
        if len(headers.getlist("host")) > 1:
            return problem(400, "wrong-host", "The request has several Host headers: send one.")
        hosts = [] if requirement.any_host and origin is None else [headers.get("host", "")]
        if (authority := scope.get("state", {}).get(AUTHORITY)) is not None:
            hosts = [headers.get("host", ""), authority]
        for host in hosts:
            if not await self._is_own_name(scope, host):
                return problem(400, "wrong-host", _not_the_daemon(host))
        if origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower():
            return problem(403, "cross-origin", "The daemon does not answer web pages of another origin.")
        return None

    async def _is_own_name(self, scope: Scope, host: str) -> bool:
        """Whether starlette's TrustedHostMiddleware accepts this Host header; its plain text response is discarded."""
        if host in self._own_names:
            return True
        probe = {**scope, "headers": [(b"host", host.encode("latin-1"))]}
        await self._trusted_host(probe, _receive_disconnect, _discard)
        if _OWN_NAME not in probe:
            return False
        if len(self._own_names) < MAX_OWN_NAMES:
            self._own_names.add(host)
        return True

    def _authorize(
        self, scope: Scope, requirement: RouteRequirement, header: str
    ) -> tuple[Response | None, Caller | None]:
        token = bearer(header)
        caller = self._tokens.check(token) if token else "no"
        if isinstance(caller, str):
            status, detail = 401, REFUSALS[caller]
            reason: AgentRefusal = f"{caller}-token"  # type: ignore[assignment]
        elif not requirement.grants(caller.scope):
            status, reason = 403, "wrong-scope"
            what = f"{scope['method']} {scope['path']}"
            detail = f"The token has scope {caller.scope}; {what} needs {requirement.needed}."
        elif not requirement.allows_run(caller):
            status, reason, detail = 403, "wrong-run", f"The token is valid for run {caller.run!r} only."
        else:
            return None, caller
        if scope["path"].startswith(AGENTS):
            self._refused_agents.note(client_address(scope), reason)
        if not token:  # no failed attempt: a person may have opened the address in a browser
            return problem(status, reason, detail, CHALLENGE), None
        return self._refuse(scope, token, status, reason, detail), None

    def _refuse(self, scope: Scope, token: str, status: int, type: str, detail: str) -> Response:
        """The response that refuses a request: `status`, but 429 after too many failures. Counts one failure.

        If the token is invalid, the failure counts for the token and for the client's address. If the token is valid,
        but has the wrong scope or run, it counts for the token only.
        """
        address = client_address(scope)
        keys = [f"token {digest_of(token)}", *([f"address {address}"] if status == 401 else [])]
        if wait := self._failures.count(*keys):
            detail = f"Too many refused requests: wait {wait} s."
            return problem(429, "too-many-failures", detail, {"Retry-After": str(wait)})
        log.warning("refused %s %r from %s: %s", scope["method"], scope["path"][:200], address, type)
        return problem(status, type, detail, CHALLENGE if status == 401 else None)

    async def _read(self, headers: Headers, receive: Receive, most: int) -> bytes | None:
        """The whole body; None when it is larger than `most` bytes, or when the client disconnects before its end.

        A body whose Content-Length is too large is not read at all.
        """
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


def client_address(scope: Scope) -> str:
    """The address from which the request came."""
    return str((scope.get("client") or ("unknown",))[0])


async def _has_own_name(scope: Scope, receive: Receive, send: Send) -> None:
    """ASGI application that notes in `scope` that the Host header names the daemon. TrustedHostMiddleware calls it only
    for such a header."""
    scope[_OWN_NAME] = True


async def _receive_disconnect() -> Message:
    """ASGI receive channel of a request without a body: it says that the client has disconnected."""
    return {"type": "http.disconnect"}


async def _discard(message: Message) -> None:
    """A send channel that discards the response; the daemon sends a problem instead."""


def _replay(body: bytes, receive: Receive) -> Receive:
    """A receive channel that gives the body once, then the messages of `receive`."""
    given = False

    async def again() -> Message:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return again


def _not_the_daemon(host: str) -> str:
    """The error text for a Host header that names another host, or no valid host."""
    if (found := _HOST.fullmatch(host)) is None:
        return f"The host {host[:253]!r} is no name of this daemon: send the name or address by which it is reached."
    name = (found["ipv6"] or found["name"]).lower()
    return f"This daemon is not {name!r}. If it should be, start it with --allowed-host {name}."
