"""Metrics of a rank, served at /metrics: of finished steps, of the current state and of the GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from tidegate.agent.optimizer.optimizer import Optimizer
from tidegate.agent.telemetry.exporter import Exporter
from tidegate.agent.telemetry.exposition import Exposition
from tidegate.agent.telemetry.gpu import GpuFigures, GpuSampler
from tidegate.agent.telemetry.nvml import open_gpu
from tidegate.agent.telemetry.recorder import Recorder
from tidegate.agent.telemetry.scrape_snapshot import read_current_state, update_metrics
from tidegate.metrics.family import DIRECTIONS


class RankMetrics:
    """Serves a rank's metrics until it is closed or garbage-collected. ConfigError when no port can be opened.

    port: port of /metrics.
    generation: function that returns the generation of the knobs in force.
    thread_failures: failures so far of the threads that communicate with the daemon; set from outside, between steps.
    refused: what the daemon refuses now (see `AgentLink.refused`); set from outside, between steps.
    overhead: CPU seconds so far by part: "exporter", "tuner" and "link" (the threads that communicate with the daemon).
        The values of "tuner" and "link" are set from outside, between steps.
    strict: if the port is taken, True raises ConfigError, and False uses a free port instead.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        recorder: Recorder,
        generation: Callable[[], int],
        bind: str,
        port: int,
        strict: bool = True,
    ) -> None:
        self.thread_failures, self.refused = 0, ""
        self._generation = generation
        self.overhead = {"tuner": 0.0, "exporter": 0.0, "link": 0.0}
        self._optimizer, self._recorder = optimizer, recorder
        self._exposition = Exposition(bool(recorder.path_names))
        self._sampler: GpuSampler | None = None
        self._exporter = Exporter(self._answer, self.overhead, bind, port, strict)
        self.port = self._exporter.port
        try:
            self._sampler = _sampler(optimizer, recorder)
        except BaseException:
            self._exporter.close()
            raise

    def begin(self) -> None:
        """Restarts GPU sampling after the optimizer moved to another device."""
        if self._sampler is not None:
            self._sampler.close()
        self._sampler = _sampler(self._optimizer, self._recorder)

    @property
    def overhead_seconds(self) -> dict[str, float]:
        """CPU seconds of the telemetry so far, by part."""
        sampler = {} if self._sampler is None else {"sampler": self._sampler.cpu_seconds}
        return {**self.overhead, "recorder": self._recorder.cpu_seconds, **sampler}

    def _answer(self, openmetrics: bool) -> bytes:
        """The body of the response to a request of /metrics: in the OpenMetrics format if `openmetrics` is True, else
        in Prometheus's text format."""
        with self._recorder.lock:
            self._recorder.catch_up()
            self._refresh()
            return self._exposition.text(self._recorder.metrics, openmetrics)

    def _refresh(self) -> None:
        """Updates the metrics of the current state."""
        gpu = self._sampler.figures if self._sampler is not None else GpuFigures()
        capacities = self._recorder.path_capacities
        state = read_current_state(
            self._optimizer, capacities, self._generation(), self.overhead_seconds, gpu, self.thread_failures,
            self.refused,
        )  # fmt: skip
        update_metrics(self._recorder.metrics, state)

    def close(self) -> None:
        """Stops sampling and serving."""
        if self._sampler is not None:
            self._sampler.close()
        self._exporter.close()


def _sampler(optimizer: Optimizer, recorder: Recorder) -> GpuSampler | None:
    """A started GPU sampler; None for a device that is not a GPU."""
    device = next((p.device for group in optimizer.param_groups for p in group["params"]), None)
    if optimizer.device.kind != "cuda" or device is None or device.type != "cuda":
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    reference = weakref.ref(recorder)  # the thread must not keep the recorder alive

    def counted() -> dict[str, int]:
        live = reference()
        return {} if live is None else counted_bytes(live)

    sampler = GpuSampler(lambda: open_gpu(uuid), counted, lambda: reference() is not None)
    sampler.start()
    return sampler


def counted_bytes(recorder: Recorder) -> dict[str, int]:
    """Bytes that Tidegate copied between host and device in all finished steps, by direction (`h2d`, `d2h`)."""
    rows = recorder.rows("tidegate_link_bytes_total")
    return {way: int(sum(n for (to, _, _), n in rows.items() if to == way)) for way in DIRECTIONS}
