"""/healthz, /readyz, /v1/proof and /metrics: health, proof of identity and metrics of the daemon itself."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from tidegate.client.daemon_proof import NONCE_PATTERN, PATH, sign
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


@router.get(PATH)
async def proof(
    request: Request, nonce: Annotated[str, Query(pattern=NONCE_PATTERN, description="random, hexadecimal")]
) -> dict[str, str]:
    """An HMAC-SHA256 over the nonce and the address at which the connection arrived. Its key is the secret in the file
    `proof.key` of the state directory."""
    host, port = request.scope["server"]
    return {"proof": sign(request.app.state.proof_key, nonce, host, port)}


@metrics_router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """The daemon's own metrics in Prometheus' text format."""
    return Response(generate_latest(request.app.state.registry), media_type=CONTENT_TYPE_LATEST)
