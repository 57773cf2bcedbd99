"""Access requirements of routes: the token scope that a route needs, and whether tokens for one run may use it.

A route declares its requirement as a FastAPI dependency: `dependencies=[READ]`, `[OPERATE]`, `[OPEN]`. The OpenAPI
document is made from the same declarations. `SecurityMiddleware` checks the requirement before it reads a body; FastAPI
would read the body first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from fastapi import Depends, Request, Security, params
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer, SecurityScopes
from starlette.routing import Match
from starlette.types import Scope as Connection

from tidegate.client.discovery import SCOPES, Scope
from tidegate.daemon.problems import ProblemError
from tidegate.daemon.security.tokens import Caller

GRANTS: Final[Mapping[Scope, frozenset[Scope]]] = {
    "read": frozenset({"read"}),
    "operate": frozenset({"operate", "read"}),
    "agent": frozenset({"agent", "read"}),
    "alert": frozenset({"alert"}),
}
"""The scopes that a token of each scope includes."""
_SAFE: Final = ("GET", "HEAD")
_UNSAFE: Final = ("POST", "PUT", "PATCH", "DELETE")
_BEARER: Final = HTTPBearer(scheme_name="token", auto_error=False)


@dataclass(frozen=True, slots=True)
class RouteRequirement:
    """The access requirement of a route. Unless it is `open`, it needs a token that includes all of `scopes`."""

    scopes: frozenset[str] = frozenset()
    open: bool = False
    any_host: bool = False
    """Whether requests without an Origin header may have any Host header: orchestrators and Prometheus send the address
    of a pod."""
    any_run: bool = False
    """Whether the middleware accepts tokens that are for a single run, whichever it is. The route itself then checks to
    which runs the token gives access."""
    run: str | None = None
    """The run that the request's path names; None if it names none."""

    def grants(self, scope: Scope) -> bool:
        return self.scopes <= GRANTS[scope]

    @property
    def needed(self) -> str:
        """Names of the token scopes that meet the requirement, joined by ` or `, for error messages."""
        return " or ".join(sorted(scope for scope in SCOPES if self.grants(scope)))

    def allows_run(self, caller: Caller) -> bool:
        """Whether the route accepts the run of the caller's token. A token that is for all runs is always accepted."""
        return caller.run is None or self.any_run or caller.run == self.run


async def _caller(
    request: Request, needed: SecurityScopes, _: HTTPAuthorizationCredentials | None = Security(_BEARER)
) -> Caller:
    """The caller that `SecurityMiddleware` has authenticated; its scope is checked a second time."""
    caller: Caller | None = request.state.caller
    if caller is None or not RouteRequirement(frozenset(needed.scopes)).grants(caller.scope):
        raise ProblemError(403, "wrong-scope", f"This request needs a token of scope {needed.scope_str}.")
    return caller


async def _caller_of_any_run(caller: Caller = Security(_caller)) -> Caller:
    return caller


async def _anybody() -> None:
    """Dependency of open routes, which need no token: it does nothing."""


async def _anybody_any_host() -> None:
    """Dependency of open routes without a check of the Host header: it does nothing."""


READ: Final = Security(_caller, scopes=["read"])
READ_OF_ANY_RUN: Final = Security(_caller_of_any_run, scopes=["read"])
OPERATE: Final = Security(_caller, scopes=["operate"])
AGENT_OF_ANY_RUN: Final = Security(_caller_of_any_run, scopes=["agent"])
ALERT: Final = Security(_caller, scopes=["alert"])
OPEN: Final = Depends(_anybody)
PROBE: Final = Depends(_anybody_any_host)


def requirement_of(route: APIRoute) -> RouteRequirement:
    """The requirement that the route declares.

    LookupError for a route that declares none or several, or scopes that no token includes together.
    """
    declarations = [depends for depends in route.dependencies if depends.dependency in _DECLARED]
    declared = declarations[0] if len(declarations) == 1 else None
    scopes = (declared.scopes or ()) if isinstance(declared, params.Security) else ()
    if declared is None or _DECLARED[declared.dependency].open == bool(scopes):
        raise LookupError(f"{route.path} must declare exactly one access requirement: see daemon/security/scopes.py")
    requirement = replace(_DECLARED[declared.dependency], scopes=frozenset(scopes))
    if not requirement.needed:
        raise LookupError(f"{route.path} needs the scopes {', '.join(sorted(scopes))}, and no token has all of them")
    return requirement


_DECLARED: Final[Mapping[Any, RouteRequirement]] = {
    _caller: RouteRequirement(),
    _caller_of_any_run: RouteRequirement(any_run=True),
    _anybody: RouteRequirement(open=True),
    _anybody_any_host: RouteRequirement(open=True, any_host=True),
}


class RouteMatch(NamedTuple):
    """The route that serves a request, found by method and path, and the access requirement of the request."""

    requirement: RouteRequirement
    """The requirement of the route. If no route serves the request: the requirement that a caller must fulfil to get a
    404 or 405 response."""
    route: APIRoute | None
    """The route that serves the request; None where there is none."""
    child_scope: Mapping[str, Any]
    """Entries for the request's scope, from starlette's matching: the path parameters, among others."""


class RouteRequirements:
    """The requirements of all routes, looked up by request. A request that no route serves gets a requirement, too."""

    def __init__(self, routes: Iterable[APIRoute]) -> None:
        self._routes: Sequence[tuple[APIRoute, RouteRequirement]] = [(route, requirement_of(route)) for route in routes]

    def match(self, connection: Connection) -> RouteMatch:
        """The route that starlette's own matching finds for the request, and its requirement."""
        same_path: list[RouteRequirement] = []
        for route, requirement in self._routes:
            match, child_scope = route.matches(connection)
            if match is not Match.NONE:
                if (run := child_scope["path_params"].get("run")) is not None:
                    requirement = replace(requirement, run=run)
                if match is Match.FULL:
                    return RouteMatch(requirement, route, child_scope)
                same_path.append(requirement)
        return RouteMatch(_undeclared(connection["method"], same_path), None, {})


def _undeclared(method: str, same_path: Sequence[RouteRequirement]) -> RouteRequirement:
    """The access requirement of a request that no route serves. A caller that fulfils it gets a 404 or 405 response.

    same_path: the requirements of the routes at this path with other methods.
    """
    if any(requirement.open for requirement in same_path):
        return next(requirement for requirement in same_path if requirement.open)
    run = next((requirement.run for requirement in same_path), None)
    any_run = any(requirement.any_run for requirement in same_path)
    if method in _SAFE:
        return RouteRequirement(frozenset({"read"}), any_run=any_run, run=run)
    if method not in _UNSAFE:
        return RouteRequirement(any_run=any_run, run=run)  # no route has this method
    writes = frozenset(scope for requirement in same_path for scope in requirement.scopes) - {"read"}
    return RouteRequirement(writes or frozenset({"operate"}), any_run=any_run, run=run)
