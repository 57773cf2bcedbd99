"""What every request passes before a route sees it: its Host, its token, the size of its body. Closed by default."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidegate.daemon.auth import Caller, Tokens, scopes_allowed
from tidegate.daemon.problems import problem


class Gate:
    """ASGI middleware. The caller, when there is one, is at `request.state.caller`."""

    def __init__(self, app: ASGIApp, *, tokens: Tokens, hosts: frozenset[str], max_body_bytes: int) -> None:
        self._app = app
        self._tokens = tokens
        self._hosts = hosts
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        host = _hostname(headers.get("host", ""))
        if "*" not in self._hosts and host not in self._hosts:
            detail = f"This daemon is not {host!r}. If it should be, start it with --allowed-host {host}."
            await problem(400, "wrong-host", detail)(scope, receive, send)
            return
        refusal, caller = self._authorize(scope["method"], scope["path"], headers.get("authorization", ""))
        if refusal is not None:
            status, type, detail = refusal
            challenge = {"WWW-Authenticate": 'Bearer realm="tidegate"'} if status == 401 else None
            await problem(status, type, detail, headers=challenge)(scope, receive, send)
            return
        scope.setdefault("state", {})["caller"] = caller
        body = await self._read(headers, receive)
        if body is None:
            detail = f"The body is larger than the {self._max_body_bytes} bytes that the daemon takes."
            await problem(413, "too-large", detail, headers={"Connection": "close"})(scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)

    def _authorize(self, method: str, path: str, header: str) -> tuple[tuple[int, str, str] | None, Caller | None]:
        if (allowed := scopes_allowed(method, path)) is None:
            return None, None
        kind, _, token = header.partition(" ")
        if kind.lower() != "bearer" or not token.strip():
            return (401, "no-token", "A token is needed: send `Authorization: Bearer …`."), None
        caller = self._tokens.check(token.strip())
        if caller is None:
            return (401, "wrong-token", "The daemon does not know this token."), None
        if caller.scope not in allowed:
            needed = " or ".join(sorted(allowed))
            detail = f"The token has scope {caller.scope}; {method} {path} needs {needed}."
            return (403, "wrong-scope", detail), None
        return None, caller

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """The whole body; None when it is too large, told before it is read where the length is known."""
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._max_body_bytes:
            return None
        body = bytearray()
        if length == "0" and "transfer-encoding" not in headers:
            return bytes(body)
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message["type"] == "http.request" and message.get("more_body", False)
            if len(body) > self._max_body_bytes:
                return None
        return bytes(body)


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


def _hostname(header: str) -> str:
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()
