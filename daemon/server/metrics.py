"""The daemon's own metrics: number of ranks by liveness, broken runs, committed generation of each run, refused agents,
requests and refused connections. Liveness and generations are read from the control plane at each scrape."""

from __future__ import annotations

import functools
import time
from collections import Counter as Tally
from collections.abc import Iterator
from typing import Final, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidegate.daemon.control.control_plane import ControlPlane
from tidegate.daemon.security.connections import WHY
from tidegate.daemon.security.refused_agents import RefusedAgentsBook
from tidegate.metrics.catalogue import BY_NAME
from tidegate.metrics.family import AGENT_REFUSALS, SECONDS_BUCKETS
from tidegate.wire.base import Liveness
from tidegate.wire.run import BROKEN_SECONDS

STATES: Final[tuple[Liveness, ...]] = get_args(Liveness)


class RunCollector(Collector):
    """Prometheus collector that reads the control plane, and the refused agents, at each scrape."""

    def __init__(self, plane: ControlPlane, refused_agents: RefusedAgentsBook) -> None:
        self._plane, self._refused_agents = plane, refused_agents

    def collect(self) -> Iterator[Metric]:
        agents = GaugeMetricFamily("tidegate_agents", BY_NAME["tidegate_agents"].help, labels=["run", "state"])
        name = "tidegate_run_broken"
        broken = GaugeMetricFamily(name, BY_NAME[name].help, labels=["run", "state", "error"])
        name = "tidegate_desired_generation"
        generations = GaugeMetricFamily(name, BY_NAME[name].help, labels=["run"])
        for run in self._plane.registry.runs.values():
            count = Tally(self._plane.registry.states(run).values())
            for state in STATES:
                agents.add_metric([run.name, state], count[state])
            known = run.breakdown if time.time() - run.last_seen < BROKEN_SECONDS else None
            error = known.error if known else ""
            broken.add_metric([run.name, "failed", error], bool(error))
            broken.add_metric([run.name, "lost", ""], known is not None and known.lost)
            generations.add_metric([run.name], run.control.committed.number)
        name = "tidegate_refused_agents"
        refused = GaugeMetricFamily(name, BY_NAME[name].help, labels=["reason"])
        addresses = Tally(one.reason for one in self._refused_agents.current())
        for reason in AGENT_REFUSALS:
            refused.add_metric([reason], addresses[reason])
        yield from (agents, broken, generations, refused)


def refused_connections(registry: CollectorRegistry) -> Counter:
    """Metric family that counts refused connections by reason."""
    name = "tidegate_refused_connections_total"
    counter = Counter(name, BY_NAME[name].help, ["reason"], registry=registry)
    for reason in WHY:
        counter.labels(reason)
    return counter


class RequestMetricsMiddleware:
    """ASGI middleware that counts and times requests, labelled by route template so that there are few label values."""

    def __init__(self, app: ASGIApp, *, registry: CollectorRegistry) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        total, seconds = "tidegate_requests_total", "tidegate_request_seconds"
        self._app = app
        self._total = Counter(total, BY_NAME[total].help, ["route", "method", "status"], registry=registry)
        self._seconds = Histogram(
            seconds, BY_NAME[seconds].help, ["route", "method"], buckets=SECONDS_BUCKETS, registry=registry
        )
        self._labelled = functools.lru_cache(maxsize=1_024)(self._find_labelled)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, begin = 500, time.perf_counter()

        async def record_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, record_status)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in ("GET", "POST", "PATCH", "DELETE", "HEAD") else "other"
            count, duration = self._labelled(route, method, f"{status // 100}xx")
            count.inc()
            duration.observe(time.perf_counter() - begin)

    def _find_labelled(self, route: str, method: str, status: str) -> tuple[Counter, Histogram]:
        return self._total.labels(route, method, status), self._seconds.labels(route, method)
