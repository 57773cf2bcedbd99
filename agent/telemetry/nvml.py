"""NVML readings of one GPU through `pynvml`: utilization, and PCIe bytes from the best source that the GPU has.

Directions are named as the host sees them: what the GPU receives (RX) is `h2d`, what it sends (TX) is `d2h`. There are
three sources of PCIe bytes:

- `fields`: byte counters (field values 197 and 198). They may wrap at 32 bits, even if NVML gives them a 64-bit type,
  and 4 GiB pass in less than a tenth of a second. If 4 GiB or more may have passed since the previous reading, the
  number of bytes is unknown (a gap). A value that needs more than 32 bits proves that the counter has 64.
- `gpm`: mean speed between two readings (Hopper and later). The readings follow each other directly, so all bytes are
  counted.
- `throughput`: speed in a window of 20 ms, for which the call blocks. Sums of bytes cannot be computed from it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from tidegate.logs import event
from tidegate.metrics.family import DIRECTIONS

log = logging.getLogger("tidegate.gpu")

FIELDS: Final = {"h2d": 198, "d2h": 197}
"""NVML's ids of the fields with the PCIe byte counters, by direction."""
GPM_METRICS: Final = {"h2d": 21, "d2h": 20}
"""NVML's ids of the GPM metrics for PCIe speeds, by direction."""
MAX_LINK_BYTES_PER_SECOND: Final = 64e9
"""Highest speed of a link whose counters may have 32 bits: PCIe 5.0 with 16 lanes. Faster links have 64-bit
counters."""
WRAP_PERIOD_SECONDS: Final = 0.04
"""Interval in seconds between readings of 32-bit counters, which wrap after 67 ms at the earliest."""
PERIOD_SECONDS: Final = 1.0
"""Interval in seconds between readings of all other sources."""


@dataclass(frozen=True)
class PcieReading:
    """One reading of a GPU's PCIe traffic. Both mappings have the keys `h2d` (to the GPU) and `d2h` (from the GPU); a
    direction without a known value is absent."""

    nbytes: Mapping[str, int] = field(default_factory=dict)
    """PCIe bytes since the previous reading, by direction: `h2d` or `d2h`. A direction is absent if its number of bytes
    is unknown."""
    bytes_per_second: Mapping[str, float] = field(default_factory=dict)
    gap: bool = False
    """Whether the number of PCIe bytes since the previous reading is unknown for a direction, because its byte counter
    may have wrapped or was reset."""


class PcieSource(Protocol):
    """Interface of the classes that read a GPU's PCIe traffic from NVML; each class uses another function of NVML."""

    name: str

    @property
    def period_seconds(self) -> float:
        """Interval in seconds at which the source must be read. If its byte counters may have 32 bits, the interval is
        shorter than the time in which they can wrap."""

    def read(self, now: float) -> PcieReading:
        """Takes a reading at `now` (seconds, monotonic clock). NVMLError when the GPU does not respond."""


@dataclass
class WrappingCounter:
    """Computes the bytes between two readings of a hardware byte counter, which starts again at 0 after 2^`bits` bytes.
    `bits` becomes 64 when a reading needs more than 32 bits."""

    bits: int
    _last: tuple[float, int] | None = None

    def bytes_since_last(self, now: float, value: int) -> int | None:
        """Bytes since the previous reading. `now`: time of this reading (seconds, monotonic clock). `value`: the
        counter's value. None at the first reading, and when the bytes are unknown: for a 32-bit counter after a pause
        in which 2^32 bytes or more may have been transferred, for a 64-bit counter when its value has decreased."""
        if value >= 2**32:
            self.bits = 64
        before, self._last = self._last, (now, value)
        if before is None:
            return None
        since, last = before
        if self.bits == 32 and (now - since) * MAX_LINK_BYTES_PER_SECOND >= 2**32:
            return None
        if self.bits == 64 and value < last:
            return None  # no link transfers 2^64 bytes: the driver was restarted
        return (value - last) % (1 << self.bits)


class _Fields:
    """PCIe source `fields`: reads the GPU's byte counters, which NVML provides as field values."""

    name = "fields"

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._members = {
            nvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
            nvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
            nvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
        }
        self._counters = {direction: WrappingCounter(32) for direction in DIRECTIONS}
        self._read_at: float | None = None
        self._detect_width(self._values())

    @property
    def period_seconds(self) -> float:
        is_wide = all(counter.bits == 64 for counter in self._counters.values())
        return PERIOD_SECONDS if is_wide else WRAP_PERIOD_SECONDS

    def _detect_width(self, values: Mapping[str, int]) -> None:
        """Sets both counters to 64 bits when the value of one of them needs more than 32 bits."""
        if max(values.values()) >= 2**32:
            for counter in self._counters.values():
                counter.bits = 64

    def _values(self) -> dict[str, int]:
        """Reads the present values of the counters, by direction. NVMLError when NVML has none."""
        fields = self._nvml.nvmlDeviceGetFieldValues(self._handle, list(FIELDS.values()))
        values: dict[str, int] = {}
        for direction, value in zip(FIELDS, fields, strict=True):
            if value.nvmlReturn != self._nvml.NVML_SUCCESS:
                raise self._nvml.NVMLError(value.nvmlReturn)
            if value.valueType not in self._members:
                raise self._nvml.NVMLError(self._nvml.NVML_ERROR_NOT_SUPPORTED)
            values[direction] = getattr(value.value, self._members[value.valueType])
        return values

    def read(self, now: float) -> PcieReading:
        before, self._read_at = self._read_at, now
        values = self._values()
        self._detect_width(values)
        moved = {way: self._counters[way].bytes_since_last(now, value) for way, value in values.items()}
        known = {way: nbytes for way, nbytes in moved.items() if nbytes is not None}
        if before is None:
            return PcieReading()
        return PcieReading(
            known, {way: nbytes / (now - before) for way, nbytes in known.items()}, len(known) < len(moved)
        )


class _Gpm:
    """PCIe source `gpm`: NVML's GPU performance monitoring (GPM). It gives the mean speed between two samples; the
    bytes are this speed times the time between the samples."""

    name = "gpm"
    period_seconds = PERIOD_SECONDS

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        self._samples = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
        self._read_at: float | None = None

    def read(self, now: float) -> PcieReading:
        self._samples.reverse()
        earlier, later = self._samples
        self._nvml.nvmlGpmSampleGet(self._handle, later)
        before, self._read_at = self._read_at, now
        if before is None:
            return PcieReading()
        speeds = self._speeds(earlier, later)
        return PcieReading({way: round(speed * (now - before)) for way, speed in speeds.items()}, speeds)

    def _speeds(self, earlier: Any, later: Any) -> dict[str, float]:
        """Mean PCIe speed between two GPM samples in bytes per second, by direction."""
        request = self._nvml.c_nvmlGpmMetricsGet_t()
        request.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(GPM_METRICS)
        request.sample1, request.sample2 = earlier, later
        for i, number in enumerate(GPM_METRICS.values()):
            request.metrics[i].metricId = number
        response = self._nvml.nvmlGpmMetricsGet(request)
        speeds: dict[str, float] = {}
        for direction, metric in zip(GPM_METRICS, response.metrics, strict=False):
            if metric.nvmlReturn != self._nvml.NVML_SUCCESS:
                raise self._nvml.NVMLError(metric.nvmlReturn)
            speeds[direction] = metric.value * 2**20  # MiB/s
        return speeds

    def close(self) -> None:
        for sample in self._samples:
            self._nvml.nvmlGpmSampleFree(sample)


class _Throughput:
    """PCIe source `throughput`: reads NVML's present PCIe speeds. It gives no numbers of bytes."""

    name = "throughput"
    period_seconds = PERIOD_SECONDS

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._counters = {"h2d": nvml.NVML_PCIE_UTIL_RX_BYTES, "d2h": nvml.NVML_PCIE_UTIL_TX_BYTES}
        self.read(time.monotonic())

    def read(self, now: float) -> PcieReading:
        get = self._nvml.nvmlDeviceGetPcieThroughput
        kibibytes = {way: get(self._handle, counter) for way, counter in self._counters.items()}
        return PcieReading({}, {way: speed * 1024.0 for way, speed in kibibytes.items()})


class DividedGpuError(Exception):
    """Raised when the process uses a part of a GPU (MIG), for which NVML has no figures."""


class Gpu:
    """Reads the utilization and the PCIe traffic of one GPU through NVML, until `close`. Only one thread may use it. A
    reading may block this thread for 40 ms."""

    def __init__(self, nvml: Any, uuid: str) -> None:
        """Opens the GPU with this UUID. NVMLError when NVML does not know the UUID, DividedGpuError when it belongs to
        a part of a GPU (MIG)."""
        self._nvml = nvml
        nvml.nvmlInit()
        try:
            self._handle = self._physical_handle(uuid)
            self.pcie = self._best_source()
        except BaseException:
            nvml.nvmlShutdown()
            raise
        self._knows_utilization = True

    def _physical_handle(self, uuid: str) -> Any:
        """NVML's handle of the whole GPU. DividedGpuError when the process uses a part of a GPU (MIG): CUDA then
        reports the UUID of the part or of the whole GPU, depending on its version, and both are recognised."""
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        except nvml.NVMLError_NotFound:
            nvml.nvmlDeviceGetHandleByUUID("MIG-" + uuid.removeprefix("GPU-"))
            raise DividedGpuError(uuid) from None
        try:
            current, _ = nvml.nvmlDeviceGetMigMode(handle)
        except nvml.NVMLError:  # a GPU that cannot be divided, or an old driver
            return handle
        if current == nvml.NVML_DEVICE_MIG_ENABLE:
            raise DividedGpuError(uuid)
        return handle

    def _best_source(self) -> PcieSource | None:
        """Opens the best PCIe source that this GPU supports: 64-bit byte counters, else GPM, else 32-bit byte counters
        (which must be read often), else NVML's present speeds. None when the GPU supports none of them."""
        fields = self._source(_Fields)
        if fields is not None and fields.period_seconds == PERIOD_SECONDS:
            return fields
        # Counters that may wrap must be read often: a source that needs fewer readings is better.
        return self._source(_Gpm) or fields or self._source(_Throughput)

    def _source(self, kind: type[PcieSource]) -> PcieSource | None:
        """Opens a PCIe source of the class `kind`. None when NVML does not support it on this GPU."""
        try:
            return kind(self._nvml, self._handle)  # type: ignore[call-arg]
        except self._nvml.NVMLError as error:
            log.debug("NVML has no PCIe figures from %s: %s", kind.name, error)
            return None

    def utilization_ratio(self) -> float | None:
        """Share of NVML's last sample period in which a kernel ran on the GPU; None where NVML has no value."""
        if not self._knows_utilization:
            return None
        try:
            return float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu) / 100
        except self._nvml.NVMLError as error:
            log.info("NVML does not report the utilization of this GPU, so that metric is absent: %s", error)
            self._knows_utilization = False
            return None

    def close(self) -> None:
        """Frees the memory of GPM samples, if any, and shuts NVML down."""
        if isinstance(self.pcie, _Gpm):
            self.pcie.close()
        self._nvml.nvmlShutdown()


def open_gpu(uuid: str) -> Gpu | None:
    """Opens the GPU with this UUID for readings. None, with the reason in the log, when NVML is not installed, does not
    know the GPU, or has no figures because the process uses a part of the GPU (MIG)."""
    try:
        import pynvml
    except ImportError:
        log.info("metrics from NVML are absent, because nvidia-ml-py is not installed: pip install nvidia-ml-py")
        return None
    try:
        return Gpu(pynvml, uuid)
    except DividedGpuError:
        log.warning(
            "GPU %s is divided (MIG): NVML counts for the whole GPU only, so that utilization and PCIe metrics are "
            "absent. All other metrics are present.",
            uuid,
            extra=event("nvml_absent", gpu=uuid, reason="MIG"),
        )
        return None
    except pynvml.NVMLError as error:
        log.info("metrics from NVML are absent for GPU %s: %s", uuid, error)
        return None


def add_by_direction(
    earlier: Mapping[str, int], more: Mapping[str, int], ways: Sequence[str] = DIRECTIONS
) -> dict[str, int]:
    """Adds two mappings by direction. `ways`: directions to include; those that are in neither mapping are left out."""
    return {way: earlier.get(way, 0) + more.get(way, 0) for way in ways if way in earlier or way in more}
