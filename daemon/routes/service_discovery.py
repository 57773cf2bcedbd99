"""/sd: the ranks that Prometheus scrapes, for its HTTP service discovery.

Each answer lists all of them. If a request fails, Prometheus keeps the targets of the answer before.
"""

from __future__ import annotations

from fastapi import APIRouter

from tidegate.daemon.control import serializers
from tidegate.daemon.routes.dependencies import Plane
from tidegate.daemon.security.scopes import OPEN
from tidegate.wire.standards import SdTarget

router = APIRouter(tags=["prometheus"], dependencies=[OPEN])


@router.get("/sd")
async def sd(plane: Plane) -> list[SdTarget]:
    """Every rank with metrics to scrape: the live and stale ranks."""
    return [serializers.sd_target(member) for member in plane.registry.reachable()]
