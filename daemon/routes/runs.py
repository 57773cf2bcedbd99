"""/v1/runs: runs, and the newest steps, timelines and rates of their ranks."""

from __future__ import annotations

import json
from typing import Annotated

from fastapi import APIRouter, Query, Response

from tidegate.daemon.control import serializers
from tidegate.daemon.control.bounded_answer import bounded_runs
from tidegate.daemon.decisions.step_window import STEPS_KEPT
from tidegate.daemon.problems import ProblemError, problem_responses
from tidegate.daemon.routes.dependencies import Author, Plane, RequestCaller
from tidegate.daemon.security.scopes import OPERATE, READ, READ_OF_ANY_RUN
from tidegate.wire.agent import Rates
from tidegate.wire.run import RunView, StepsView, TimelinesView
from tidegate.wire.timeline import TimelineView

router = APIRouter(prefix="/v1/runs", tags=["runs"])


@router.get("", dependencies=[READ_OF_ANY_RUN], response_model=list[RunView])
async def runs(plane: Plane, who: RequestCaller) -> Response:
    """All runs that the token gives access to, newest first. The answer has at most 48 MiB. If it would be larger,
    `last_step` and `effective` of ranks and `totals` of runs are left out, first for the runs with the most data for
    each rank. If that does not suffice, the largest runs come without ranks."""
    visible = sorted((r for r in plane.registry.runs.values() if who.may_see(r.name)), key=lambda r: -r.created_at)
    answers = bounded_runs(serializers.run_view(run, plane.registry.states(run)) for run in visible)
    return Response(b"[" + b",".join(answers) + b"]", media_type="application/json")


@router.get("/{run}", dependencies=[READ], response_model=RunView)
async def one(plane: Plane, run: str) -> Response:
    """One run and its ranks. The answer has at most 48 MiB. Where it would be larger, it comes without `last_step`,
    `effective` and `totals`; if that does not suffice, without ranks."""
    found = plane.registry.run(run)
    await plane.load_last_steps(found)
    answers = bounded_runs([serializers.run_view(found, plane.registry.states(found))])
    return Response(answers[0], media_type="application/json")


@router.delete("/{run}", status_code=204, dependencies=[OPERATE], responses=problem_responses(409))
async def delete(plane: Plane, author: Author, run: str, reason: Annotated[str, Query(max_length=300)] = "") -> None:
    """Deletes the run permanently: its generations, ranks, steps and alerts. The audit log keeps the run's rows, and
    gets a row with the author of the deletion. 409 while any rank is live or stale."""
    await plane.turns.do(lambda: plane.retention.delete(plane.registry.run(run), author, reason))


@router.get("/{run}/ranks/{rank}/timelines", dependencies=[READ])
async def timelines(plane: Plane, run: str, rank: int) -> TimelinesView:
    """The steps of the rank that have a timeline: the newest step, and earlier steps about 5 seconds apart."""
    return TimelinesView(run=run, rank=rank, steps=plane.registry.rank(run, rank).timelines.steps)


@router.get(
    "/{run}/ranks/{rank}/timeline",
    dependencies=[READ],
    response_model=TimelineView,
    responses={204: {"description": "none yet"}},
)
async def timeline(
    plane: Plane, run: str, rank: int, step: Annotated[int | None, Query(ge=0)] = None
) -> TimelineView | Response:
    """The newest timeline of the rank, or the timeline of one step; 204 before the first timeline."""
    stored = plane.registry.rank(run, rank).timelines
    view = stored.newest if step is None else stored.at(step)
    if view is None and step is not None:
        kept = ", ".join(map(str, stored.steps[-10:])) or "none yet"
        raise ProblemError(
            404,
            "unknown-step",
            f"There is no timeline of step {step} of rank {rank}. The newest steps with a timeline: {kept}.",
        )
    return view or Response(status_code=204)


@router.get(
    "/{run}/ranks/{rank}/rates",
    dependencies=[READ],
    response_model=Rates,
    responses={204: {"description": "none yet"}},
)
async def rates(plane: Plane, run: str, rank: int) -> Rates | Response:
    """The rank's live rate card, from which its predictions are made; 204 before it has measured any rate."""
    return plane.registry.rank(run, rank).rates or Response(status_code=204)


@router.get("/{run}/ranks/{rank}/steps", dependencies=[READ], response_model=StepsView)
async def steps(plane: Plane, run: str, rank: int, limit: Annotated[int, Query(ge=1, le=STEPS_KEPT)] = 200) -> Response:
    """The newest steps of one rank, oldest first."""
    reports = await plane.step_writer.newest(plane.registry.rank(run, rank).hello.agent, limit)
    # The stored JSON is sent unchanged: it was validated when it was received.
    body = f'{{"run":{json.dumps(run)},"rank":{rank},"steps":[{",".join(reports)}]}}'
    return Response(body, media_type="application/json")
