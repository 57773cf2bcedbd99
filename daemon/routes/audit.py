"""The audit log: who did what, when and why. It is append-only, and there is no route that writes to it."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query

from tidegate.daemon.routes.dependencies import Plane
from tidegate.daemon.security.scopes import READ
from tidegate.wire.audit import AuditRow

router = APIRouter(prefix="/v1", tags=["audit"], dependencies=[READ])
Limit = Annotated[int, Query(ge=1, le=5_000)]


@router.get("/audit")
async def whole(plane: Plane, limit: Limit = 500) -> list[AuditRow]:
    """The newest rows of all runs, and of what concerns none (tokens, the daemon's own alerts), oldest first."""
    return await asyncio.to_thread(plane.store.audit, None, limit)


@router.get("/runs/{run}/audit")
async def of_run(plane: Plane, run: str, limit: Limit = 500) -> list[AuditRow]:
    """The newest rows of the run, oldest first."""
    return await asyncio.to_thread(plane.store.audit, plane.roster.run(run).name, limit)
