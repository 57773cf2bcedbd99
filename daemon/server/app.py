"""Application factory: builds the FastAPI application of the daemon from its settings."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from tidegate import __version__
from tidegate.daemon import problems
from tidegate.daemon.configuration.settings import Settings
from tidegate.daemon.control.alerts import AlertRegistry
from tidegate.daemon.control.control_plane import ControlPlane
from tidegate.daemon.routes import (
    agents,
    alerts,
    audit,
    events,
    health,
    knobs,
    runs,
    service_discovery,
    start_page,
)
from tidegate.daemon.routes.api_description import describe
from tidegate.daemon.routes.fast_route import FastRouteMiddleware
from tidegate.daemon.security.middleware import SecurityMiddleware
from tidegate.daemon.security.refused_agents import RefusedAgentsBook
from tidegate.daemon.security.scopes import RouteRequirements
from tidegate.daemon.security.tokens import Tokens, ensure_files, read_files
from tidegate.daemon.server.metrics import RequestMetricsMiddleware, RunCollector, refused_connections
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
        version=__version__,
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
    app.state.refused_agents = refused_agents = RefusedAgentsBook()
    registry.register(RunCollector(plane, refused_agents))
    app.state.refused = refused_connections(registry)
    problems.install(app)
    parts = (agents, runs, knobs, audit, alerts, events, service_discovery, health, start_page)
    served = [agents.fast_router, agents.refused_router, *(part.router for part in parts)]
    served += [health.metrics_router] if settings.metrics else []
    for router in served:
        app.include_router(router)
    app.state.metrics = settings.metrics
    app.state.routes = [route for router in served for route in router.routes]
    app.openapi = functools.cache(lambda: describe(app))  # type: ignore[method-assign]
    app.state.tokens = tokens = Tokens(store)
    requirements = RouteRequirements(app.state.routes)
    app.add_middleware(FastRouteMiddleware, handlers=app.exception_handlers)
    app.add_middleware(
        SecurityMiddleware, tokens=tokens, requirements=requirements, settings=settings, refused_agents=refused_agents
    )
    app.add_middleware(RequestMetricsMiddleware, registry=registry)
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    plane: ControlPlane = app.state.plane

    async def check_tokens() -> None:
        app.state.tokens.check_waiting()

    tick = functools.partial(plane.turns.do, plane.tick)
    timers = [
        asyncio.create_task(_forever(work, pause, failed))
        for work, pause, failed in (
            (tick, TICK_SECONDS, "the periodic work of the control plane (its tick) failed"),
            (
                check_tokens,
                TOKEN_CHECK_SECONDS,
                "the check whether tokens of waiting requests are still valid failed",
            ),
        )
    ]
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


async def _forever(work: Callable[[], Awaitable[None]], pause: float, failed: str) -> None:
    """Timer loop: does `work`, then pauses for `pause` seconds, until the task is cancelled. failed: the text for the
    log if the work fails; a temporary error, such as a full disk, does not stop the loop."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("%s; it is tried again", failed)
            await asyncio.sleep(RETRY_SECONDS)
        await asyncio.sleep(pause)
