"""One rank's /metrics: a collector over what the meter holds, on a port of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from tidegate.agent.telemetry.meter import Histogram, Meter
from tidegate.catalogue import METRICS
from tidegate.errors import ConfigError
from tidegate.metric import Metric


class MeterCollector(Collector):
    """Makes families of what the meter holds when Prometheus asks; nothing is done between scrapes."""

    def __init__(self, meter: Meter, has_paths: bool, refresh: Callable[[], None], lock: threading.RLock) -> None:
        """`refresh` brings the meter up to date; `lock` guards it."""
        self._meter, self._refresh, self._lock = meter, refresh, lock
        self._families = [metric for metric in METRICS if metric.needs != "paths" or has_paths]

    def describe(self) -> Iterable[Family]:
        return ()

    def collect(self) -> Iterator[Family]:
        with self._lock:
            self._refresh()
            families = [family for metric in self._families if (family := self._family(metric)) is not None]
        yield from families

    def _family(self, metric: Metric) -> Family | None:
        if metric.type == "histogram":
            histograms = HistogramMetricFamily(metric.name, metric.help, labels=list(metric.labels))
            for labels, histogram in self._meter.histograms(metric.name).items():
                histograms.add_metric(labels, _buckets(histogram), histogram.total)
            return histograms
        rows = self._meter.shown(metric.name)
        if metric.needs == "nvml" and not rows:
            return None
        kind: Any = CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily
        family: CounterMetricFamily | GaugeMetricFamily = kind(metric.name, metric.help, labels=list(metric.labels))
        for labels, value in rows.items():
            family.add_metric(labels, value)
        return family


def _buckets(histogram: Histogram) -> list[Any]:
    """Cumulative, with the newest observation of each bucket as its exemplar."""
    seen, found = 0, []
    for i, (bound, count) in enumerate(zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True)):
        seen += count
        example = histogram.examples.get(i)
        if example is None:
            found.append((bound, float(seen)))
        else:
            exemplar = Exemplar({"step": str(example.step)}, example.value, example.timestamp)
            found.append((bound, float(seen), exemplar))  # type: ignore[arg-type]
    return found


class Exporter:
    """Serves /metrics of one rank at `bind`:`port`; port 0 takes a free one. `overhead["exporter"]` grows by the CPU
    seconds that it takes."""

    def __init__(self, collector: Collector, overhead: dict[str, float], bind: str, port: int) -> None:
        try:
            self._server = _Server(bind, port, collector, overhead)
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
    """One thread a request. All of its CPU time goes to the overhead, not only the collecting."""

    def __init__(self, bind: str, port: int, collector: Collector, overhead: dict[str, float]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(collector)
        self._overhead = overhead
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
