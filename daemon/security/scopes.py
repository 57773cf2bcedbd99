"""What each route asks of its caller, declared at the route: the OpenAPI document is made from the same words.

A route asks for one scope, or is open to all: `dependencies=[READ]`, `[OPERATE]`, `[OPEN]`. The gate asks before it
reads a body; FastAPI would read it first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from fastapi import Depends, Request, Security, params
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer, SecurityScopes
from starlette.routing import Match
from starlette.types import Scope as Connection

from tidegate.client.daemon_client import SCOPES, Scope
from tidegate.daemon.problems import ProblemError
from tidegate.daemon.security.tokens import Caller

GRANTS: Final[Mapping[Scope, frozenset[Scope]]] = {
    "read": frozenset({"read"}),
    "operate": frozenset({"operate", "read"}),
    "agent": frozenset({"agent", "read"}),
    "alert": frozenset({"alert"}),
}
"""What a token of each scope may do."""
_SAFE: Final = ("GET", "HEAD")
_UNSAFE: Final = ("POST", "PUT", "PATCH", "DELETE")
_BEARER: Final = HTTPBearer(scheme_name="token", auto_error=False)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a route asks. Where it is not `open`, a token is needed that may do all of `scopes`."""

    scopes: frozenset[str] = frozenset()
    open: bool = False
    by_any_name: bool = False
    """Whatever the Host header says: orchestrators and Prometheus ask by the address of a pod, and send no Origin."""
    of_any_run: bool = False
    """A token that is for one run comes in: the route itself looks what it may see."""
    run: str | None = None
    """The run that the path names."""

    def grants(self, scope: Scope) -> bool:
        return self.scopes <= GRANTS[scope]

    @property
    def needed(self) -> str:
        """The scopes of tokens that are good for it, in words."""
        return " or ".join(sorted(scope for scope in SCOPES if self.grants(scope)))

    def opens(self, caller: Caller) -> bool:
        """Whether the caller's token, where it is for one run, may come near."""
        return caller.run is None or self.of_any_run or caller.run == self.run


async def _caller(
    request: Request, asked: SecurityScopes, _: HTTPAuthorizationCredentials | None = Security(_BEARER)
) -> Caller:
    """Whom the gate has let in; it has asked the same before."""
    caller: Caller | None = request.state.caller
    if caller is None or not Asked(frozenset(asked.scopes)).grants(caller.scope):
        raise ProblemError(403, "wrong-scope", f"This needs a token for {asked.scope_str}.")
    return caller


async def _caller_of_any_run(caller: Caller = Security(_caller)) -> Caller:
    return caller


async def _anybody() -> None:
    """Nothing is asked."""


async def _anybody_by_any_name() -> None:
    """Nothing is asked, not even that the Host is right."""


READ: Final = Security(_caller, scopes=["read"])
READ_OF_ANY_RUN: Final = Security(_caller_of_any_run, scopes=["read"])
OPERATE: Final = Security(_caller, scopes=["operate"])
AGENT_OF_ANY_RUN: Final = Security(_caller_of_any_run, scopes=["agent"])
ALERT: Final = Security(_caller, scopes=["alert"])
OPEN: Final = Depends(_anybody)
PROBE: Final = Depends(_anybody_by_any_name)


def asked_by(route: APIRoute) -> Asked:
    """What the route declares; LookupError for one that does not, or asks what no token is good for."""
    found = [depends for depends in route.dependencies if depends.dependency in _DECLARED]
    declared = found[0] if len(found) == 1 else None
    scopes = (declared.scopes or ()) if isinstance(declared, params.Security) else ()
    if declared is None or _DECLARED[declared.dependency].open == bool(scopes):
        raise LookupError(
            f"{route.path} must declare one thing that it asks of its caller: see daemon/security/scopes.py"
        )
    asked = replace(_DECLARED[declared.dependency], scopes=frozenset(scopes))
    if not asked.needed:
        raise LookupError(f"{route.path} asks for {', '.join(sorted(scopes))}, which no token is good for")
    return asked


_DECLARED: Final[Mapping[Any, Asked]] = {
    _caller: Asked(),
    _caller_of_any_run: Asked(of_any_run=True),
    _anybody: Asked(open=True),
    _anybody_by_any_name: Asked(open=True, by_any_name=True),
}


class Declared:
    """What all routes of the application ask, found by the routes' own rules. What is declared nowhere is closed."""

    def __init__(self, routes: Iterable[APIRoute]) -> None:
        self._routes: Sequence[tuple[APIRoute, Asked]] = [(route, asked_by(route)) for route in routes]

    def of(self, connection: Connection) -> Asked:
        """What the request's route asks."""
        same_path: list[Asked] = []
        for route, asked in self._routes:
            match, found = route.matches(connection)
            if match is not Match.NONE:
                asked = replace(asked, run=found["path_params"].get("run"))
                if match is Match.FULL:
                    return asked
                same_path.append(asked)
        return _undeclared(connection["method"], same_path)


def _undeclared(method: str, same_path: Sequence[Asked]) -> Asked:
    """What is asked before somebody is told that there is no such route, or not with this method."""
    if any(asked.open for asked in same_path):
        return next(asked for asked in same_path if asked.open)
    run = next((asked.run for asked in same_path), None)
    near = any(asked.of_any_run for asked in same_path)
    if method in _SAFE:
        return Asked(frozenset({"read"}), of_any_run=near, run=run)
    if method not in _UNSAFE:
        return Asked(of_any_run=near, run=run)  # no route has it
    writes = frozenset(scope for asked in same_path for scope in asked.scopes) - {"read"}
    return Asked(writes or frozenset({"operate"}), of_any_run=near, run=run)
