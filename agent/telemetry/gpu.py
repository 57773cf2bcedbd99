"""Samples NVML in a thread of its own, and holds its PCIe bytes against those that Tidegate counted."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tidegate.agent.telemetry.nvml import PERIOD_SECONDS, Gpu, Pcie, sums
from tidegate.logs import event

log = logging.getLogger("tidegate.gpu")

COMPARE_SECONDS: Final = 10.0
COMPARE_WINDOW: Final = 30
"""Comparisons that a discrepancy spans: five minutes, so that the step under way, whose bytes are not counted yet,
weighs little."""
MIN_COMPARED_BYTES: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class GpuFigures:
    """The newest figures. By direction; empty or None where NVML does not say."""

    source: str = ""
    utilization_ratio: float | None = None
    pcie_bytes: Mapping[str, int] = field(default_factory=dict)
    """Since sampling began."""
    pcie_bytes_per_second: Mapping[str, float] = field(default_factory=dict)
    discrepancy: Mapping[str, float] = field(default_factory=dict)
    """(NVML's bytes - counted bytes) / NVML's bytes."""


class GpuSampler:
    """`figures` may be read from any thread; `counted` says how many bytes were copied so far, by direction. The thread
    ends when it is closed, or nobody wants figures any more.

    All calls of NVML are made by the thread: `open_gpu`, which gives None where NVML has nothing to say, may block for
    some 40 ms as well.
    """

    def __init__(
        self,
        open_gpu: Callable[[], Gpu | None],
        counted: Callable[[], Mapping[str, int]],
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        self.figures = GpuFigures()
        self.cpu_seconds = 0.0
        self._open_gpu, self._counted, self._wanted = open_gpu, counted, wanted
        self._compared: deque[tuple[Mapping[str, int], Mapping[str, int]]] = deque(maxlen=COMPARE_WINDOW)
        self._look_at = self._compare_at = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tidegate-gpu", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, and NVML with it. Idempotent."""
        self._stop.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        gpu: Gpu | None = None
        try:
            gpu = self._open_gpu()
            if gpu is None:
                return
            while not self._stop.wait(gpu.pcie.period_seconds if gpu.pcie is not None else PERIOD_SECONDS):
                if not self._wanted():
                    return
                self.sample(gpu, time.monotonic())
                self.cpu_seconds = time.thread_time()
        except Exception as error:
            # A GPU that is lost, for one: what was last seen of it is no longer so.
            log.warning("no more figures from NVML: %s", error, extra=event("nvml_lost", reason=str(error)))
            self.figures = GpuFigures()
        finally:
            if gpu is not None:
                gpu.close()

    def sample(self, gpu: Gpu, now: float) -> None:
        """One reading, at `now` seconds on the monotonic clock."""
        before, source = self.figures, gpu.pcie
        pcie = source.read(now) if source is not None else Pcie()
        nbytes = sums(before.pcie_bytes, pcie.nbytes)
        if pcie.gap:
            self._compared.clear()
        utilization = before.utilization_ratio
        if now >= self._look_at:
            self._look_at, utilization = now + PERIOD_SECONDS, gpu.utilization_ratio()
        discrepancy = before.discrepancy if not pcie.gap else {}
        if nbytes and now >= self._compare_at:
            self._compare_at, discrepancy = now + COMPARE_SECONDS, self._compare(nbytes)
        self.figures = GpuFigures(
            source=source.name if source is not None else "",
            utilization_ratio=utilization,
            pcie_bytes=nbytes,
            pcie_bytes_per_second=pcie.bytes_per_second,
            discrepancy=discrepancy,
        )

    def _compare(self, nbytes: Mapping[str, int]) -> dict[str, float]:
        counted = self._counted()
        self._compared.append((nbytes, counted))
        first_said, first_counted = self._compared[0]
        found: dict[str, float] = {}
        for way, count in nbytes.items():
            said = count - first_said.get(way, 0)
            if said >= MIN_COMPARED_BYTES:
                found[way] = (said - (counted.get(way, 0) - first_counted.get(way, 0))) / said
        return found
