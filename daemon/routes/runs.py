"""/v1/runs: the runs, and what their ranks did last."""

from __future__ import annotations

import json
from typing import Annotated

from fastapi import APIRouter, Query, Response

from tidegate.daemon import views
from tidegate.daemon.control.window import STEPS_KEPT
from tidegate.daemon.deps import Plane, Who
from tidegate.wire import RunView, StepsView, TimelineView

router = APIRouter(prefix="/v1/runs", tags=["runs"])


@router.get("")
async def runs(plane: Plane, who: Who) -> list[RunView]:
    """All runs that the token opens, newest last."""
    seen = [run for run in plane.roster.runs.values() if who.may_see(run.name)]
    return [views.run_view(run, plane.roster.states(run)) for run in seen]


@router.get("/{run}")
async def one(plane: Plane, run: str) -> RunView:
    """One run and its ranks."""
    found = plane.roster.run(run)
    return views.run_view(found, plane.roster.states(found))


@router.get("/{run}/ranks/{rank}/timeline", response_model=TimelineView, responses={204: {"description": "none yet"}})
async def timeline(plane: Plane, run: str, rank: int) -> TimelineView | Response:
    """The newest timeline that the rank sent; 204 before the first."""
    return plane.roster.rank(run, rank).timeline or Response(status_code=204)


@router.get("/{run}/ranks/{rank}/steps", response_model=StepsView)
async def steps(plane: Plane, run: str, rank: int, limit: Annotated[int, Query(ge=1, le=STEPS_KEPT)] = 200) -> Response:
    """The newest steps of one rank, oldest first."""
    told = plane.history.newest(plane.roster.rank(run, rank).hello.agent, limit)
    # As they were stored: they were checked when they came.
    body = f'{{"run":{json.dumps(run)},"rank":{rank},"steps":[{",".join(told)}]}}'
    return Response(body, media_type="application/json")
