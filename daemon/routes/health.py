"""/healthz, /readyz and /metrics: health and metrics of the daemon itself."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from tidegate.daemon.problems import ProblemError, problem_responses
from tidegate.daemon.routes.dependencies import Plane
from tidegate.daemon.security.scopes import PROBE
from tidegate.daemon.storage.readiness import Readiness

router = APIRouter(tags=["health"], dependencies=[PROBE])
metrics_router = APIRouter(tags=["prometheus"], dependencies=[PROBE])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Answers 200 while the process is alive."""
    return {"status": "ok"}


@router.get("/readyz", responses=problem_responses(503))
async def readyz(request: Request, plane: Plane) -> dict[str, str]:
    """Answers 200 if the database can be read and written: a test row was written within the last second. Answers 503
    if not, and while the daemon shuts down."""
    readiness: Readiness = request.app.state.readiness
    if reason := await readiness.why_not():
        raise ProblemError(503, "not-ready", reason)
    if plane.closing:
        raise ProblemError(503, "not-ready", "The daemon is shutting down.")
    return {"status": "ready"}


@metrics_router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """The daemon's own metrics in Prometheus' text format."""
    return Response(generate_latest(request.app.state.registry), media_type=CONTENT_TYPE_LATEST)
