"""One rank's /metrics: a collector over the recorder's totals, on a port of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from tidegate.agent.optimizer import AdamW
from tidegate.agent.telemetry.recorder import Histogram, Recorder
from tidegate.catalogue import BY_NAME, SECONDS_BUCKETS
from tidegate.errors import ConfigError
from tidegate.knobs import AUTO, EQ1, KnobValue, device_share, weights_of
from tidegate.plan.ops import path_lanes
from tidegate.timeline import STALL_CAUSES

Labels = tuple[str, ...]


class StepCollector:
    """Makes families from totals when Prometheus asks; nothing is done between scrapes."""

    def __init__(self, optimizer: AdamW, recorder: Recorder) -> None:
        self._optimizer = optimizer
        self._recorder = recorder
        self.generation = 0
        store = optimizer.engine.store
        self._paths = dict(store.paths) if store is not None else {}
        causes = [cause for cause in STALL_CAUSES if cause not in ("lock", "collective")]
        causes += [lane for path in self._paths for lane in path_lanes(path)]
        self._known_causes = {("update", cause): 0.0 for cause in causes}
        self.overhead: dict[str, float] = {"tuner": 0.0, "exporter": 0.0, "link": 0.0}

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        with self._recorder.lock:
            families = [*self._counters(), *self._gauges(), *self._control()]
            if self._paths:
                families += [*self._path_counters(), *self._path_gauges()]
        yield from families

    def _counters(self) -> Iterator[Metric]:
        t = self._recorder.totals
        yield _histogram("tidegate_phase_seconds", {(phase,): h for phase, h in t.phases.items()})
        yield _counter("tidegate_exposed_seconds_total", {(phase,): v for phase, v in t.exposed.items()})
        yield _counter("tidegate_steps_total", {(): t.steps})
        yield _counter("tidegate_skipped_steps_total", {(): t.skipped})
        yield _counter("tidegate_tokens_total", {(): t.tokens})
        yield _counter("tidegate_link_bytes_total", t.link_bytes)
        yield _counter("tidegate_link_busy_seconds_total", t.link_busy)
        yield _counter("tidegate_stall_seconds_total", {**self._known_causes, **t.stalls})
        yield _counter("tidegate_update_spill_seconds_total", {(): t.spill})
        yield _counter("tidegate_cpu_seconds_total", {(phase,): v for phase, v in t.cpu.items()})
        yield _counter("tidegate_update_params_total", {(where,): v for where, v in t.updated.items()})
        overhead = {"recorder": self._recorder.cpu_seconds, **self.overhead}
        yield _counter("tidegate_agent_overhead_seconds_total", {(part,): v for part, v in overhead.items()})

    def _gauges(self) -> Iterator[Metric]:
        t = self._recorder.totals
        if (last := t.last) is None:
            return
        yield _gauge("tidegate_step_timestamp_seconds", {(): last.timestamp})
        for name, value in (("tidegate_loss", last.loss), ("tidegate_grad_norm", last.grad_norm)):
            if value is not None:
                yield _gauge(name, {(): value})
        for name, rows in (
            ("tidegate_device_memory_peak_bytes", last.device_memory_peak_bytes),
            ("tidegate_host_memory_bytes", last.host_memory_bytes),
            ("tidegate_subgroups", last.subgroups),
        ):
            yield _gauge(name, {(label,): value for label, value in rows.items()})
        for name, value in (
            ("tidegate_predicted_phase_seconds", t.predicted_update_seconds),
            ("tidegate_prediction_error_ratio", t.prediction_error),
        ):
            if value is not None:
                yield _gauge(name, {("update",): value})

    def _path_counters(self) -> Iterator[Metric]:
        t, paths = self._recorder.totals, self._paths.items()
        yield _counter("tidegate_path_bytes_total", t.path_bytes)
        yield _counter("tidegate_path_busy_seconds_total", t.path_busy)
        # As they are now, in a step that hangs, too.
        waits = {(name, op): s for name, path in paths for op, s in path.counters.lock_wait_seconds.items()}
        yield _counter("tidegate_path_lock_wait_seconds_total", waits)
        errors = {(name, op): n for name, path in paths for op, n in path.counters.errors.items()}
        yield _counter("tidegate_path_errors_total", errors)

    def _path_gauges(self) -> Iterator[Metric]:
        last = self._recorder.totals.last
        states = last.path_states if last is not None else ()
        ceilings: dict[Labels, float] = {
            (s.path, op): speed for s in states for op, speed in s.ceiling_bytes_per_second.items()
        }
        yield _gauge("tidegate_path_ceiling_bytes_per_second", ceilings)
        yield _gauge("tidegate_path_free_bytes", {(s.path,): s.free_bytes for s in states})
        wear: dict[Labels, float] = {
            (s.path,): s.written_bytes_per_day for s in states if s.written_bytes_per_day is not None
        }
        yield _gauge("tidegate_path_written_bytes_per_day", wear)
        shares: dict[Labels, float] = {}
        for state, knobs in self._knobs():
            for path, share in _shares(knobs.get("tier_split", AUTO), list(self._paths)).items():
                shares[path, state] = share
        yield _gauge("tidegate_tier_share", shares)

    def _knobs(self) -> tuple[tuple[str, Mapping[str, KnobValue]], ...]:
        return ("desired", self._optimizer.knobs.as_dict()), ("effective", self._optimizer.effective_knobs())

    def _control(self) -> Iterator[Metric]:
        rows: dict[Labels, float] = {}
        for state, knobs in self._knobs():
            for name, number in _as_numbers(knobs).items():
                rows[name, state] = number
        yield _gauge("tidegate_knob", rows)
        yield _gauge("tidegate_generation", {(): self.generation})


class Exporter:
    """Serves /metrics of one rank at `bind`:`port`; port 0 takes a free one."""

    def __init__(self, collector: StepCollector, bind: str, port: int) -> None:
        try:
            self._server = _Server(bind, port, collector)
        except OSError as error:
            raise ConfigError(
                f"/metrics cannot listen on {bind}:{port}: {error.strerror}. Choose another metrics_port, or 0 for any."
            ) from error
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="tidegate-exporter", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)


class _Server(ThreadingHTTPServer):
    """One thread a request. All of its CPU time goes to the collector's `overhead`, not only the collecting."""

    def __init__(self, bind: str, port: int, collector: StepCollector) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(collector)
        self._overhead = collector.overhead
        self._counting = threading.Lock()
        self._accepting = 0.0
        self.address_family = socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        super().__init__((bind, port), _Handler)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        super().process_request_thread(request, client_address)
        self._count(time.thread_time())

    def service_actions(self) -> None:
        """Called by the accepting thread in every turn of its loop."""
        before, self._accepting = self._accepting, time.thread_time()
        self._count(self._accepting - before)

    def _count(self, seconds: float) -> None:
        with self._counting:
            self._overhead["exporter"] += seconds


class _Handler(BaseHTTPRequestHandler):
    """Answers with all metrics, in the format that is asked for. Not compressed: it is a few kilobytes."""

    server: _Server

    def do_GET(self) -> None:
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        body = encode(self.server.registry)
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are no news."""


def _as_numbers(knobs: Mapping[str, KnobValue]) -> dict[str, float]:
    numbers = {"static_ratio": float(knobs["static_ratio"])}
    if knobs["stride"] != AUTO:
        numbers["device_share"] = device_share(knobs["stride"])  # type: ignore[arg-type]
    if (cache := knobs.get("host_cache", AUTO)) != AUTO:
        numbers["host_cache_bytes"] = float(cache)
    if (order := knobs.get("order", AUTO)) != AUTO:
        numbers["alternate_order"] = float(order == "alternate")
    return numbers


def _shares(tier_split: KnobValue, paths: Sequence[str]) -> dict[str, float]:
    """The share of each path; none while it is `auto`, or nothing is in storage."""
    weights = {} if tier_split in (AUTO, EQ1) else weights_of(str(tier_split))
    total = sum(weights.values())
    return {path: weights.get(path, 0.0) / total for path in paths} if total else {}


def _family(kind: type[Any], name: str) -> Any:
    metric = BY_NAME[name]
    return kind(name, metric.help, labels=list(metric.labels))


def _counter(name: str, rows: Mapping[Any, float]) -> Metric:
    family: CounterMetricFamily = _family(CounterMetricFamily, name)
    for labels, value in rows.items():
        family.add_metric(labels, value)
    return family


def _gauge(name: str, rows: Mapping[Labels, float]) -> Metric:
    family: GaugeMetricFamily = _family(GaugeMetricFamily, name)
    for labels, value in rows.items():
        family.add_metric(labels, value)
    return family


def _histogram(name: str, rows: Mapping[Labels, Histogram]) -> Metric:
    family: HistogramMetricFamily = _family(HistogramMetricFamily, name)
    for labels, histogram in rows.items():
        seen, buckets = 0, []
        for bound, count in zip((*map(str, SECONDS_BUCKETS), "+Inf"), histogram.counts, strict=True):
            seen += count
            buckets.append((bound, float(seen)))
        family.add_metric(labels, buckets, histogram.total)
    return family
