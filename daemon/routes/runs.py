"""/v1/runs: the runs, and what their ranks did last."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from tidegate.daemon import views
from tidegate.daemon.control.run import STEPS_KEPT
from tidegate.daemon.deps import Plane, Who
from tidegate.wire import AuditRow, RunView, StepsView, TimelineView

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


@router.get("/{run}/ranks/{rank}/steps")
async def steps(
    plane: Plane, run: str, rank: int, limit: Annotated[int, Query(ge=1, le=STEPS_KEPT)] = 200
) -> StepsView:
    """The newest steps of one rank, oldest first."""
    return StepsView(run=run, rank=rank, steps=tuple(plane.roster.rank(run, rank).steps)[-limit:])


@router.get("/{run}/audit")
async def audit(plane: Plane, run: str, limit: Annotated[int, Query(ge=1, le=5_000)] = 500) -> list[AuditRow]:
    """The newest rows of the run, oldest first."""
    return plane.store.audit(plane.roster.run(run).name, limit)
