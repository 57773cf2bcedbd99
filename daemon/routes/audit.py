"""/v1/audit and /v1/runs/{run}/audit: the audit log of all changes. It is append-only; no route writes to it."""

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
    """The newest rows of the whole audit log, oldest first: of all runs, of tokens, and of alerts without a run."""
    return await asyncio.to_thread(plane.store.audit, None, limit)


@router.get("/runs/{run}/audit")
async def of_run(plane: Plane, run: str, limit: Limit = 500) -> list[AuditRow]:
    """The newest audit rows of the run, oldest first."""
    return await asyncio.to_thread(plane.store.audit, plane.registry.run(run).name, limit)
