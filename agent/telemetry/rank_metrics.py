"""Everything that a rank shows of itself: figures of steps, of the moment and of the GPU, served at /metrics."""

from __future__ import annotations

import weakref

import torch

from tidegate.agent.optimizer.adamw import AdamW
from tidegate.agent.telemetry.exporter import Exporter
from tidegate.agent.telemetry.exposition import Exposition
from tidegate.agent.telemetry.gpu import GpuFigures, GpuSampler
from tidegate.agent.telemetry.nvml import open_gpu
from tidegate.agent.telemetry.recorder import Recorder
from tidegate.agent.telemetry.scrape_snapshot import look, show
from tidegate.metrics.family import DIRECTIONS


class Watch:
    """`port` is where /metrics is served; `generation` is set by whoever applies knobs, `thread_failures` by whose
    threads fail, `overhead` grows by what tuner and link cost. What listens ends when this is collected.

    strict: ConfigError when the port is taken; else another one is. ConfigError when nothing can listen there."""

    def __init__(self, optimizer: AdamW, recorder: Recorder, bind: str, port: int, strict: bool = True) -> None:
        self.generation = self.thread_failures = 0
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
        """The optimizer works on another device: its figures are taken from now on."""
        if self._sampler is not None:
            self._sampler.close()
        self._sampler = _sampler(self._optimizer, self._recorder)

    @property
    def costs(self) -> dict[str, float]:
        """CPU seconds so far, by part."""
        sampler = {} if self._sampler is None else {"sampler": self._sampler.cpu_seconds}
        return {**self.overhead, "recorder": self._recorder.cpu_seconds, **sampler}

    def _answer(self, openmetrics: bool) -> bytes:
        with self._recorder.lock:
            self._recorder.catch_up()
            self._refresh()
            return self._exposition.text(self._recorder.meter, openmetrics)

    def _refresh(self) -> None:
        """What is so at this moment."""
        gpu = self._sampler.figures if self._sampler is not None else GpuFigures()
        capacities = self._recorder.path_capacities
        now = look(self._optimizer, capacities, self.generation, self.costs, gpu, self.thread_failures)
        show(self._recorder.meter, now)

    def close(self) -> None:
        if self._sampler is not None:
            self._sampler.close()
        self._exporter.close()


def _sampler(optimizer: AdamW, recorder: Recorder) -> GpuSampler | None:
    """One that runs; None for a device that is not a GPU."""
    device = next((p.device for group in optimizer.param_groups for p in group["params"]), None)
    if optimizer.device.kind != "cuda" or device is None or device.type != "cuda":
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    alive = weakref.ref(recorder)  # a thread must not keep it

    def counted() -> dict[str, int]:
        found = alive()
        return {} if found is None else counted_bytes(found)

    sampler = GpuSampler(lambda: open_gpu(uuid), counted, lambda: alive() is not None)
    sampler.start()
    return sampler


def counted_bytes(recorder: Recorder) -> dict[str, int]:
    """Bytes that were copied in the steps that have ended, by direction."""
    rows = recorder.rows("tidegate_link_bytes_total")
    return {way: int(sum(n for (to, _, _), n in rows.items() if to == way)) for way in DIRECTIONS}
