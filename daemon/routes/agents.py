"""/v1/agents: what training processes say, and what they are told."""

from __future__ import annotations

import re
import time
from typing import Annotated, Final

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from tidegate.daemon.control import serializers
from tidegate.daemon.problems import ProblemError, also
from tidegate.daemon.routes.dependencies import LOOK_SECONDS, Holds, Own, Plane, Wait, Who, check_holds
from tidegate.daemon.routes.fast_route import LeanRoute
from tidegate.daemon.security.scopes import AGENT_OF_ANY_RUN, READ_OF_ANY_RUN
from tidegate.errors import KnobError
from tidegate.knobs.knobs import Knobs, specs_for
from tidegate.wire.agent import PROTOCOL_VERSION, AgentHello, AgentReport, Directive, Lease, Vote

_HOST_AND_PORT: Final = re.compile(r"[A-Za-z0-9_.:%\[\]-]{1,294}:(?P<port>[0-9]{1,5})")
router = APIRouter(prefix="/v1/agents", tags=["agents"])

hot = APIRouter(prefix="/v1/agents", tags=["agents"], route_class=LeanRoute)


class Patience(BaseModel):
    wait: Wait = 0.0


class Known(Patience):
    """What an agent that asks for its directive has heard of."""

    committed: Annotated[int, Field(ge=-1, lt=2**63)] = -1
    proposed: Annotated[int | None, Field(ge=-1, lt=2**63)] = None


@router.post("", status_code=201, dependencies=[AGENT_OF_ANY_RUN], responses=also(409))
async def hello(plane: Plane, who: Who, message: AgentHello) -> Lease:
    """Registers one rank of a run; the first one makes the run."""
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
    """Ends the request for what Prometheus cannot scrape: `/sd` gives it on as it is."""
    found = _HOST_AND_PORT.fullmatch(address)
    if address and (found is None or not 0 < int(found["port"]) < 65_536):
        detail = (
            f"metrics_address {address[:80]!r} is no host:port with a port from 1 to 65,535: give the name or address "
            "by which Prometheus reaches the rank (metrics_bind or advertise_host of tidegate.attach), or nothing."
        )
        raise ProblemError(422, "invalid-message", detail)


@hot.post("/{agent}/reports", dependencies=[AGENT_OF_ANY_RUN], responses=also(409))
async def report(plane: Plane, agent: Own, message: AgentReport) -> Lease:
    """What the rank did since its last report; renews its lease."""
    return await plane.turns.do(plane.report, agent, message)


@hot.get("/{agent}/directive", dependencies=[READ_OF_ANY_RUN])
async def directive(plane: Plane, agent: Own, holds: Holds, message: Annotated[Known, Query()]) -> Directive:
    """At once when there is something newer than the caller knows, else after `wait` seconds. 401 when its token ends
    meanwhile."""
    deadline, seen = time.monotonic() + message.wait, -1 if message.proposed is None else message.proposed
    while True:
        run, member = plane.roster.member(agent)
        found = serializers.directive(run, member.hello.rank)
        asked = found.proposed is not None and found.proposed > seen
        left = deadline - time.monotonic()
        if found.committed > message.committed or asked or left <= 0 or plane.closing:
            return found
        await run.orders.wait(min(left, LOOK_SECONDS), agent)
        check_holds(holds)


@hot.post("/{agent}/votes", dependencies=[AGENT_OF_ANY_RUN])
async def vote(plane: Plane, agent: Own, holds: Holds, message: Vote, asked: Annotated[Patience, Query()]) -> Directive:
    """Whether the rank can have the knobs that were proposed. Answers when that is decided, or after `wait` seconds."""
    deadline = time.monotonic() + asked.wait
    await plane.turns.do(plane.vote, agent, message)
    while True:
        run, member = plane.roster.member(agent)
        left = deadline - time.monotonic()
        if run.control.is_decided(message.generation) or left <= 0 or plane.closing:
            return serializers.directive(run, member.hello.rank)
        await run.orders.wait(min(left, LOOK_SECONDS), agent)
        check_holds(holds)


@router.delete("/{agent}", status_code=204, dependencies=[AGENT_OF_ANY_RUN])
async def goodbye(plane: Plane, agent: Own) -> None:
    """The rank ends on purpose."""
    await plane.turns.do(plane.goodbye, agent)
