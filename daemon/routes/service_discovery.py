"""/sd: Prometheus HTTP service discovery. The list is always complete; on an error Prometheus keeps its old targets."""

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
