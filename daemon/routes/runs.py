"""/v1/runs: the runs, and what their ranks did last."""

from __future__ import annotations

import json
from typing import Annotated

from fastapi import APIRouter, Query, Response

from tidegate.daemon.control import serializers
from tidegate.daemon.control.bounded_answer import bounded
from tidegate.daemon.decisions.step_window import STEPS_KEPT
from tidegate.daemon.problems import ProblemError, also
from tidegate.daemon.routes.dependencies import Author, Plane, Who
from tidegate.daemon.security.scopes import OPERATE, READ, READ_OF_ANY_RUN
from tidegate.wire.agent import Rates
from tidegate.wire.run import RunView, StepsView, TimelinesView
from tidegate.wire.timeline import TimelineView

router = APIRouter(prefix="/v1/runs", tags=["runs"])


@router.get("", dependencies=[READ_OF_ANY_RUN], response_model=list[RunView])
async def runs(plane: Plane, who: Who) -> Response:
    """All runs that the token opens, newest first. Where that is more than 48 MiB, those whose ranks tell most
    come without what their ranks did last (`last_step`, `effective`, `totals`), then the largest without ranks."""
    seen = sorted((r for r in plane.roster.runs.values() if who.may_see(r.name)), key=lambda r: -r.created_at)
    told = bounded(serializers.run_view(run, plane.roster.states(run)) for run in seen)
    return Response(b"[" + b",".join(told) + b"]", media_type="application/json")


@router.get("/{run}", dependencies=[READ], response_model=RunView)
async def one(plane: Plane, run: str) -> Response:
    """One run and its ranks, in 48 MiB at most, as the list of runs."""
    found = plane.roster.run(run)
    await plane.recall(found)
    told = bounded([serializers.run_view(found, plane.roster.states(found))])
    return Response(told[0], media_type="application/json")


@router.delete("/{run}", status_code=204, dependencies=[OPERATE], responses=also(409))
async def delete(plane: Plane, author: Author, run: str, reason: Annotated[str, Query(max_length=300)] = "") -> None:
    """Forgets the run for good: generations, ranks, steps and alerts. The audit log keeps its rows and says who deleted
    it. 409 while any rank is live or stale."""
    await plane.turns.do(lambda: plane.retention.delete(plane.roster.run(run), author, reason))


@router.get("/{run}/ranks/{rank}/timelines", dependencies=[READ])
async def timelines(plane: Plane, run: str, rank: int) -> TimelinesView:
    """The steps of the rank whose timelines are kept: the newest, and about one in five seconds of those before."""
    return TimelinesView(run=run, rank=rank, steps=plane.roster.rank(run, rank).timelines.steps)


@router.get(
    "/{run}/ranks/{rank}/timeline",
    dependencies=[READ],
    response_model=TimelineView,
    responses={204: {"description": "none yet"}},
)
async def timeline(
    plane: Plane, run: str, rank: int, step: Annotated[int | None, Query(ge=0)] = None
) -> TimelineView | Response:
    """The newest timeline that the rank sent, or that of a step; 204 before the first."""
    known = plane.roster.rank(run, rank).timelines
    found = known.newest if step is None else known.at(step)
    if found is None and step is not None:
        kept = ", ".join(map(str, known.steps[-10:])) or "none yet"
        raise ProblemError(404, "unknown-step", f"There is no timeline of step {step} of rank {rank}. Kept: {kept}.")
    return found or Response(status_code=204)


@router.get(
    "/{run}/ranks/{rank}/rates",
    dependencies=[READ],
    response_model=Rates,
    responses={204: {"description": "none yet"}},
)
async def rates(plane: Plane, run: str, rank: int) -> Rates | Response:
    """The rank's live rate card, which its predictions are made with; 204 before it has measured any."""
    return plane.roster.rank(run, rank).rates or Response(status_code=204)


@router.get("/{run}/ranks/{rank}/steps", dependencies=[READ], response_model=StepsView)
async def steps(plane: Plane, run: str, rank: int, limit: Annotated[int, Query(ge=1, le=STEPS_KEPT)] = 200) -> Response:
    """The newest steps of one rank, oldest first."""
    told = await plane.history.newest(plane.roster.rank(run, rank).hello.agent, limit)
    # As they were stored: they were checked when they came.
    body = f'{{"run":{json.dumps(run)},"rank":{rank},"steps":[{",".join(told)}]}}'
    return Response(body, media_type="application/json")
