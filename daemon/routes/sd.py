"""/sd: Prometheus HTTP service discovery. Always 200 and complete: on an error Prometheus keeps what it had."""

from __future__ import annotations

from fastapi import APIRouter

from tidegate.daemon import views
from tidegate.daemon.deps import Plane
from tidegate.daemon.scopes import OPEN
from tidegate.wire.standards import SdTarget

router = APIRouter(tags=["prometheus"], dependencies=[OPEN])


@router.get("/sd")
async def sd(plane: Plane) -> list[SdTarget]:
    """Every rank that can be scraped."""
    return [views.sd_target(member) for member in plane.roster.reachable()]
