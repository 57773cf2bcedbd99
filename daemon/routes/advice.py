"""/v1/runs/{run}/advice: what the model would choose for this run, pinned knobs included."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter

from tidegate.daemon.control import serializers
from tidegate.daemon.control.preview import advise, evidence
from tidegate.daemon.routes.dependencies import Plane
from tidegate.daemon.security.scopes import READ
from tidegate.wire.prediction import Advice

router = APIRouter(prefix="/v1/runs/{run}", tags=["knobs"], dependencies=[READ])


@router.get("/advice")
async def advice(plane: Plane, run: str) -> Advice:
    """Changes that are predicted to shorten the update by 5 % or more, or why there are none."""
    found = plane.roster.run(run)
    knobs = serializers.knobs_of(found.control.committed)
    return await asyncio.to_thread(advise, found.name, knobs, evidence(found))
