"""Application factory: builds the FastAPI application of the daemon from its settings."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from tidegate.daemon import problems
from tidegate.daemon.configuration.settings import Settings
from tidegate.daemon.control.alerts import AlertRegistry
from tidegate.daemon.control.control_plane import ControlPlane
from tidegate.daemon.routes import (
    advice,
    agents,
    alerts,
    audit,
    events,
    health,
    knobs,
    proof,
    runs,
    service_discovery,
    start_page,
)
from tidegate.daemon.routes.api_description import describe
from tidegate.daemon.routes.fast_route import FastRouteMiddleware
from tidegate.daemon.security.middleware import SecurityMiddleware
from tidegate.daemon.security.scopes import RouteRequirements
from tidegate.daemon.security.tokens import Tokens, ensure_files, read_files
from tidegate.daemon.server.metrics import RequestMetricsMiddleware, Requests, RunCollector, refused_connections
from tidegate.daemon.storage.open_database import open_store
from tidegate.daemon.storage.readiness import Readiness
from tidegate.daemon.storage.state_directory import prepare, proof_key

TICK_SECONDS: Final = 0.1
"""Pause between two ticks of the control plane, which handle deadlines and leases."""
TOKEN_CHECK_SECONDS: Final = 1.0
"""Pause between two checks of the tokens of waiting requests."""
RETRY_SECONDS: Final = 2.0
"""Additional pause after a tick, or a check of tokens, that failed."""
log = logging.getLogger(__name__)


def create_app(settings: Settings) -> FastAPI:
    """The daemon's application. Opens the store and writes the token files; DaemonError when that is not possible."""
    home = prepare(settings.state_dir)
    store = open_store(settings)
    if settings.token_dir is None:
        ensure_files(store, home)
    else:
        read_files(store, settings.token_dir)
    plane = ControlPlane(
        store,
        lease_seconds=settings.lease_seconds,
        proposal_seconds=settings.proposal_seconds,
        keep_seconds=settings.keep_reports_seconds,
        keep_runs_seconds=settings.keep_runs_seconds,
    )
    store.use_short_timeout()
    app = FastAPI(
        title="Tidegate",
        version=_version(),
        openapi_url=None,  # served by a route of `routes/start_page.py`
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # the daemon has its own metrics
    )
    app.state.plane = plane
    app.state.proof_key = proof_key(home)
    app.state.readiness = Readiness(store)
    app.state.alerts = book = AlertRegistry(store)
    plane.retention.deleted = book.forget
    app.state.registry = registry = CollectorRegistry()
    registry.register(RunCollector(plane))
    app.state.refused = refused_connections(registry)
    problems.install(app)
    routers = [
        agents.fast_router,
        *(
            part.router
            for part in (
                agents,
                runs,
                knobs,
                audit,
                alerts,
                events,
                service_discovery,
                health,
                proof,
                advice,
                start_page,
            )
        ),
    ]
    served = routers + ([health.metrics_router] if settings.metrics else [])
    for router in served:
        app.include_router(router)
    app.state.metrics = settings.metrics
    app.state.routes = [route for router in served for route in router.routes]
    app.openapi = lambda: _described(app)  # type: ignore[method-assign]
    app.state.tokens = tokens = Tokens(store)
    requirements = RouteRequirements(app.state.routes)
    app.add_middleware(FastRouteMiddleware, handlers=app.exception_handlers)
    app.add_middleware(SecurityMiddleware, tokens=tokens, requirements=requirements, settings=settings)
    app.add_middleware(RequestMetricsMiddleware, requests=Requests(registry))
    return app


def _described(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        app.openapi_schema = describe(app)
    return app.openapi_schema


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    plane: ControlPlane = app.state.plane
    timers = [asyncio.create_task(_tick_forever(plane)), asyncio.create_task(_check_tokens_forever(app.state.tokens))]
    try:
        yield
    finally:
        plane.close()
        async with plane.turns.stopped():
            for timer in timers:
                timer.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await timer
            try:
                plane.save_all()
            finally:
                plane.store.close()


async def _tick_forever(plane: ControlPlane) -> None:
    """Timer loop: calls the control plane's `tick` until the task is cancelled."""
    while True:
        try:
            await plane.turns.do(plane.tick)
        except Exception:  # a temporary error, such as a full disk, must not stop the timer loop
            log.exception("the periodic work of the control plane (its tick) failed; it is tried again")
            await asyncio.sleep(RETRY_SECONDS)
        await asyncio.sleep(TICK_SECONDS)


async def _check_tokens_forever(tokens: Tokens) -> None:
    """Timer loop: wakes the waiting requests whose token has ended, until the task is cancelled."""
    while True:
        try:
            tokens.check_waiting()
        except Exception:  # as in `_tick_forever`
            log.exception("the check whether tokens of waiting requests are still valid failed; it is tried again")
            await asyncio.sleep(RETRY_SECONDS)
        await asyncio.sleep(TOKEN_CHECK_SECONDS)


def _version() -> str:
    try:
        return version("tidegate")
    except PackageNotFoundError:
        return "0"
