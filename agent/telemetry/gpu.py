"""Reads figures of the GPU from NVML (NVIDIA's management library) in a separate thread, and compares NVML's PCIe bytes
with the bytes that Tidegate counted."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tidegate.agent.telemetry.nvml import PERIOD_SECONDS, Gpu, PcieReading, add_by_direction
from tidegate.logs import event

log = logging.getLogger("tidegate.gpu")

COMPARE_SECONDS: Final = 10.0
"""Interval in seconds between two comparisons of NVML's bytes with Tidegate's."""
COMPARE_WINDOW: Final = 30
"""Number of comparisons in the window (five minutes) over which the discrepancy is computed. The window is long because
the bytes of the running step are in NVML's count, but not yet in Tidegate's."""
MIN_COMPARED_BYTES: Final = 1 << 20
"""Minimum number of bytes that NVML must have counted in the window. With fewer, no discrepancy is computed."""


@dataclass(frozen=True, kw_only=True)
class GpuFigures:
    """Newest readings of NVML. Mappings have PCIe values by direction (`h2d`, `d2h`). Where NVML has no value, mappings
    are empty, and the utilization is None."""

    source: str = ""
    utilization_ratio: float | None = None
    pcie_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes over PCIe since the first reading, by direction (`h2d`, `d2h`)."""
    pcie_bytes_per_second: Mapping[str, float] = field(default_factory=dict)
    discrepancy: Mapping[str, float] = field(default_factory=dict)
    """Relative difference by direction: (bytes of NVML - bytes counted by Tidegate) / bytes of NVML."""


class GpuSampler:
    """Thread that reads NVML periodically. `figures` may be read from any thread.

    open_gpu: function that opens the GPU; it returns None where NVML has no figures. It may block for some 40 ms.
    counted: function that returns the bytes that Tidegate has copied so far, by direction.
    wanted: function that returns False when the thread should end.

    All calls of NVML are made by the thread, `open_gpu` included. The thread ends when it is closed, or `wanted`
    returns False.
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
        self._utilization_at = self._compare_at = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tidegate-gpu", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, which also shuts NVML down. Idempotent."""
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
            # For example a GPU that is lost: old figures are dropped, because they no longer hold.
            log.warning(
                "NVML failed, its metrics (GPU utilization, PCIe bytes) are absent from now on: %s", error,
                extra=event("nvml_lost", reason=str(error)),
            )  # fmt: skip
            self.figures = GpuFigures()
        finally:
            if gpu is not None:
                gpu.close()

    def sample(self, gpu: Gpu, now: float) -> None:
        """Takes one reading and updates `figures`. `now`: seconds on the monotonic clock."""
        before, source = self.figures, gpu.pcie
        pcie = source.read(now) if source is not None else PcieReading()
        nbytes = add_by_direction(before.pcie_bytes, pcie.nbytes)
        if pcie.gap:
            self._compared.clear()
        utilization = before.utilization_ratio
        if now >= self._utilization_at:
            self._utilization_at, utilization = now + PERIOD_SECONDS, gpu.utilization_ratio()
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
        """Returns the relative difference between NVML's bytes and Tidegate's over the last COMPARE_WINDOW comparisons,
        by direction. `nbytes`: NVML's bytes so far. Directions with fewer bytes than MIN_COMPARED_BYTES are left
        out."""
        counted = self._counted()
        self._compared.append((nbytes, counted))
        first_nvml, first_counted = self._compared[0]
        discrepancy: dict[str, float] = {}
        for direction, count in nbytes.items():
            nvml_bytes = count - first_nvml.get(direction, 0)
            if nvml_bytes >= MIN_COMPARED_BYTES:
                counted_bytes = counted.get(direction, 0) - first_counted.get(direction, 0)
                discrepancy[direction] = (nvml_bytes - counted_bytes) / nvml_bytes
        return discrepancy
