"""What routes are given: the control plane and who asks. All async: others FastAPI runs in threads, each request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, Query, Request

from tidegate.daemon.control.alerts import AlertBook
from tidegate.daemon.control.control_plane import ControlPlane
from tidegate.daemon.problems import ProblemError
from tidegate.daemon.security.tokens import Caller, Tokens, bearer

MAX_WAIT_SECONDS = 60.0
LOOK_SECONDS = 1.0
"""How often a request that waits looks whether its token is still good."""


async def _plane(request: Request) -> ControlPlane:
    plane: ControlPlane = request.app.state.plane
    return plane


async def _alerts(request: Request) -> AlertBook:
    book: AlertBook = request.app.state.alerts
    return book


async def _author(request: Request) -> str:
    """Whose token it is, and who the holder says to be: `alice@node1 (operate)`."""
    caller: Caller = request.state.caller
    claim = "".join(c for c in request.headers.get("tidegate-actor", "") if c.isprintable())
    return f"{claim[:40]} ({caller.name[:20]})" if claim else caller.name[:64]


async def _caller(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


def own_agent(plane: ControlPlane, who: Caller, agent: str) -> str:
    """The agent, if the caller's token is for its run. One that is unknown is told so by who looks for it."""
    if seat := plane.roster.agents.get(agent):
        who.check_run(seat[0])
    return agent


async def _own(request: Request, agent: str) -> str:
    return own_agent(request.app.state.plane, request.state.caller, agent)


def still_holds(tokens: Tokens, authorization: str) -> Callable[[], bool]:
    """Whether the token in the header opens anything now."""
    token = bearer(authorization)
    return lambda: isinstance(tokens.check(token), Caller)


def check_holds(holds: Callable[[], bool]) -> None:
    """Ends a request that has waited when its token opens nothing any more."""
    if not holds():
        raise ProblemError(401, "token-ended", "The token was withdrawn or has expired: ask for a new one.")


async def _holds(request: Request) -> Callable[[], bool]:
    """Whether the request's token still opens anything, for answers that last."""
    return still_holds(request.app.state.tokens, request.headers.get("authorization", ""))


Alerts = Annotated[AlertBook, Depends(_alerts)]
Plane = Annotated[ControlPlane, Depends(_plane)]
Who = Annotated[Caller, Depends(_caller)]
Author = Annotated[str, Depends(_author)]
Own = Annotated[str, Depends(_own)]
Holds = Annotated[Callable[[], bool], Depends(_holds)]
Wait = Annotated[float, Query(ge=0, le=MAX_WAIT_SECONDS, description="seconds")]
