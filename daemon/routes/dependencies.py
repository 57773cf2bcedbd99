"""FastAPI dependencies of routes: the control plane, the caller, the agent.

All dependencies are async functions, because FastAPI runs each call of a synchronous dependency in a thread.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Query, Request

from tidegate.daemon.control.alerts import AlertRegistry
from tidegate.daemon.control.control_plane import ControlPlane
from tidegate.daemon.control.run import Notifier
from tidegate.daemon.problems import ProblemError
from tidegate.daemon.security.tokens import Caller, Tokens, bearer

MAX_WAIT_SECONDS = 60.0


async def _plane(request: Request) -> ControlPlane:
    plane: ControlPlane = request.app.state.plane
    return plane


async def _alerts(request: Request) -> AlertRegistry:
    book: AlertRegistry = request.app.state.alerts
    return book


async def _author(request: Request) -> str:
    """The author for the audit log: the name that the client claims and the token's name: `alice@node1 (operate)`."""
    caller: Caller = request.state.caller
    claim = "".join(c for c in request.headers.get("tidegate-actor", "") if c.isprintable())
    return f"{claim[:40]} ({caller.name[:20]})" if claim else caller.name[:64]


async def _caller(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


def own_agent(plane: ControlPlane, who: Caller, agent: str) -> str:
    """The agent's id. Raises a 403 problem if the caller's token is for another run. It does not check that the agent
    is known."""
    if seat := plane.registry.agents.get(agent):
        who.check_run(seat[0])
    return agent


async def _own_agent(request: Request, agent: str) -> str:
    return own_agent(request.app.state.plane, request.state.caller, agent)


@dataclass(frozen=True, slots=True)
class RequestToken:
    """The token of a request that may wait for a long time, during which the token may end."""

    tokens: Tokens
    token: str

    def is_valid(self) -> bool:
        return self.tokens.is_valid(self.token)

    def require_valid(self) -> None:
        """Raises a 401 problem if the token was withdrawn or has expired while the request waited."""
        if not self.is_valid():
            raise ProblemError(401, "token-ended", "The token was revoked or has expired: ask for a new one.")

    async def wait(self, notifier: Notifier, seconds: float, who: str) -> None:
        """Waits until `notifier` notifies the caller `who` or the token ends, at most `seconds`."""
        with self.tokens.call_at_end(self.token, functools.partial(notifier.notify, who)):
            await notifier.wait(seconds, who)


def request_token(tokens: Tokens, authorization: str) -> RequestToken:
    """The token of an Authorization header."""
    return RequestToken(tokens, bearer(authorization))


async def _request_token(request: Request) -> RequestToken:
    return request_token(request.app.state.tokens, request.headers.get("authorization", ""))


Alerts = Annotated[AlertRegistry, Depends(_alerts)]
Plane = Annotated[ControlPlane, Depends(_plane)]
RequestCaller = Annotated[Caller, Depends(_caller)]
Author = Annotated[str, Depends(_author)]
OwnAgent = Annotated[str, Depends(_own_agent)]
OwnToken = Annotated[RequestToken, Depends(_request_token)]
Wait = Annotated[float, Query(ge=0, le=MAX_WAIT_SECONDS, description="seconds")]
