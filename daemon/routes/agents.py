"""/v1/agents: endpoints for the agents in training processes: register, report, get the directive, vote, leave."""

from __future__ import annotations

import re
import time
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field

from tidegate.daemon.control import serializers
from tidegate.daemon.problems import ProblemError, problem_responses
from tidegate.daemon.routes.dependencies import (
    OwnAgent,
    OwnToken,
    Plane,
    RequestCaller,
    Wait,
)
from tidegate.daemon.routes.fast_route import FastRoute
from tidegate.daemon.security.middleware import client_address
from tidegate.daemon.security.refused_agents import RefusedAgentsBook
from tidegate.daemon.security.scopes import AGENT_OF_ANY_RUN, READ, READ_OF_ANY_RUN
from tidegate.errors import KnobError
from tidegate.knobs.knobs import Knobs, specs_for
from tidegate.wire.agent import PROTOCOL_VERSION, AgentHello, AgentReport, Directive, Lease, RefusedAgents, Vote
from tidegate.wire.base import ErrorName

_HOST_AND_PORT: Final = re.compile(r"[A-Za-z0-9_.:%\[\]-]{1,294}:(?P<port>[0-9]{1,5})")
router = APIRouter(prefix="/v1/agents", tags=["agents"])
refused_router = APIRouter(tags=["agents"])
fast_router = APIRouter(prefix="/v1/agents", tags=["agents"], route_class=FastRoute)


class WaitQuery(BaseModel):
    """Query of a long poll. `wait`: longest time until the response, in seconds."""

    wait: Wait = 0.0


class DirectiveQuery(WaitQuery):
    """Query for a directive: the newest committed and proposed generations that the agent knows (-1 or None: none), and
    the longest wait in seconds."""

    committed: Annotated[int, Field(ge=-1, lt=2**63)] = -1
    proposed: Annotated[int | None, Field(ge=-1, lt=2**63)] = None


class GoodbyeQuery(BaseModel):
    """Query of a goodbye. `error`: name of the type of the exception that ended the training; empty for none."""

    error: ErrorName = ""


@router.post("", status_code=201, dependencies=[AGENT_OF_ANY_RUN], responses=problem_responses(409))
async def hello(plane: Plane, who: RequestCaller, request: Request, message: AgentHello) -> Lease:
    """Registers one rank of a run; the first rank creates the run."""
    if not who.may_see(message.run):
        request.app.state.refused_agents.note(client_address(request.scope), "wrong-run")
    who.check_run(message.run)
    if message.protocol != PROTOCOL_VERSION:
        detail = (
            f"The agent speaks protocol {message.protocol}, the daemon {PROTOCOL_VERSION}: install the same version."
        )
        raise ProblemError(400, "wrong-protocol", detail)
    _check_metrics_address(message.metrics_address)
    try:
        knobs = Knobs().changed(message.knobs, specs_for(message.paths))
    except KnobError as error:
        raise ProblemError(422, "invalid-knob", str(error), knob=error.knob) from error
    return await plane.turns.do(plane.hello, message, knobs, who.token)


def _check_metrics_address(address: str) -> None:
    """Raises a 422 problem if the address is neither empty nor `host:port`. `/sd` gives it to Prometheus."""
    found = _HOST_AND_PORT.fullmatch(address)
    if address and (found is None or not 0 < int(found["port"]) < 65_536):
        detail = (
            f"metrics_address {address[:80]!r} is no host:port with a port from 1 to 65,535: give the name or address "
            "by which Prometheus reaches the rank (metrics_bind or advertise_host of tidegate.attach), or nothing."
        )
        raise ProblemError(422, "invalid-message", detail)


@fast_router.post("/{agent}/reports", dependencies=[AGENT_OF_ANY_RUN], responses=problem_responses(409))
async def report(plane: Plane, agent: OwnAgent, message: AgentReport) -> Lease:
    """Takes a report of the rank about the time since its last report, and renews the rank's lease."""
    return await plane.turns.do(plane.report, agent, message)


@fast_router.get("/{agent}/directive", dependencies=[READ_OF_ANY_RUN])
async def directive(
    plane: Plane, agent: OwnAgent, token: OwnToken, message: Annotated[DirectiveQuery, Query()]
) -> Directive:
    """Long poll for the rank's directive: the committed knobs, and a proposal on which the rank is to vote. Returns as
    soon as one of them is newer than what the caller knows, at the latest after `wait` seconds. 401 when the token
    expires or is withdrawn during the wait."""
    deadline, seen = time.monotonic() + message.wait, -1 if message.proposed is None else message.proposed
    while True:
        run, member = plane.registry.member(agent)
        current = serializers.directive(run, member.hello.rank)
        has_new_proposal = current.proposed is not None and current.proposed > seen
        left = deadline - time.monotonic()
        if current.committed > message.committed or has_new_proposal or left <= 0 or plane.closing:
            return current
        await token.wait(run.directive_notifier, left, agent)
        token.require_valid()


@fast_router.post("/{agent}/votes", dependencies=[AGENT_OF_ANY_RUN])
async def vote(
    plane: Plane, agent: OwnAgent, token: OwnToken, message: Vote, query: Annotated[WaitQuery, Query()]
) -> Directive:
    """Takes the rank's vote on proposed knobs: whether it can use them. Returns when the proposal is decided, or after
    `wait` seconds."""
    deadline = time.monotonic() + query.wait
    await plane.turns.do(plane.vote, agent, message)
    while True:
        run, member = plane.registry.member(agent)
        left = deadline - time.monotonic()
        if run.control.is_decided(message.generation) or left <= 0 or plane.closing:
            return serializers.directive(run, member.hello.rank)
        await token.wait(run.directive_notifier, left, agent)
        token.require_valid()


@router.delete("/{agent}", status_code=204, dependencies=[AGENT_OF_ANY_RUN])
async def goodbye(plane: Plane, agent: OwnAgent, query: Annotated[GoodbyeQuery, Query()]) -> None:
    """Signs the agent off: its rank has finished, or failed if `error` names the type of an exception."""
    await plane.turns.do(plane.goodbye, agent, query.error)


@refused_router.get("/v1/refused-agents", dependencies=[READ])
async def refused_agents(request: Request) -> list[RefusedAgents]:
    """Agents that the daemon has refused in the last 3 minutes, by address and reason: their runs are not shown."""
    book: RefusedAgentsBook = request.app.state.refused_agents
    return book.current()
