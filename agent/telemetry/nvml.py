"""What NVML says of one GPU, through `pynvml`: utilization and PCIe bytes, from the best source that the GPU has.

Directions are the host's: what the GPU receives (RX) is `h2d`, what it sends (TX) is `d2h`. Three sources know PCIe:

- `fields`: byte counters (field values 197 and 198). They may wrap at 32 bits, whatever their type says, and 4 GiB are
  through in less than a tenth of a second: a reading that comes too late for one wrap at most is a gap, and its bytes
  are unknown. A value that needs more than 32 bits proves 64.
- `gpm`: mean speed between two readings (Hopper and later), so that nothing is missed.
- `throughput`: speed in a window of 20 ms, for which the call blocks: of no use for sums.
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
GPM_METRICS: Final = {"h2d": 21, "d2h": 20}
MAX_LINK_BYTES_PER_SECOND: Final = 64e9
"""PCIe 5.0 with 16 lanes. A faster link has 64-bit counters."""
WRAP_PERIOD_SECONDS: Final = 0.04
"""Between readings of 32-bit counters: they wrap after 67 ms at the earliest."""
PERIOD_SECONDS: Final = 1.0


@dataclass(frozen=True)
class Pcie:
    """What one reading adds. By direction; empty where nothing can be said."""

    nbytes: Mapping[str, int] = field(default_factory=dict)
    """Since the reading before."""
    bytes_per_second: Mapping[str, float] = field(default_factory=dict)
    gap: bool = False
    """Bytes went by that nobody has counted."""


class PcieSource(Protocol):
    name: str

    @property
    def period_seconds(self) -> float:
        """The longest pause between readings that loses nothing."""

    def read(self, now: float) -> Pcie:
        """At `now`, on the monotonic clock, in seconds. NVMLError when the GPU no longer answers."""


@dataclass
class WrappingCounter:
    """Bytes since the reading before, of a counter of `bits` bits: 32, until a value is seen that needs 64."""

    bits: int
    _last: tuple[float, int] | None = None

    def take(self, now: float, value: int) -> int | None:
        """None at first, and after a gap: too long a pause for 32 bits, or 64 bits that went back."""
        if value >= 2**32:
            self.bits = 64
        before, self._last = self._last, (now, value)
        if before is None:
            return None
        since, last = before
        if self.bits == 32 and (now - since) * MAX_LINK_BYTES_PER_SECOND >= 2**32:
            return None
        if self.bits == 64 and value < last:
            return None  # no link moves 2^64 bytes: the driver began anew
        return (value - last) % (1 << self.bits)


class _Fields:
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
        self._look_at_width(self._values())

    @property
    def period_seconds(self) -> float:
        is_wide = all(counter.bits == 64 for counter in self._counters.values())
        return PERIOD_SECONDS if is_wide else WRAP_PERIOD_SECONDS

    def _look_at_width(self, values: Mapping[str, int]) -> None:
        """What one counter shows holds for both."""
        if max(values.values()) >= 2**32:
            for counter in self._counters.values():
                counter.bits = 64

    def _values(self) -> dict[str, int]:
        """By direction."""
        found = self._nvml.nvmlDeviceGetFieldValues(self._handle, list(FIELDS.values()))
        values: dict[str, int] = {}
        for direction, value in zip(FIELDS, found, strict=True):
            if value.nvmlReturn != self._nvml.NVML_SUCCESS:
                raise self._nvml.NVMLError(value.nvmlReturn)
            if value.valueType not in self._members:
                raise self._nvml.NVMLError(self._nvml.NVML_ERROR_NOT_SUPPORTED)
            values[direction] = getattr(value.value, self._members[value.valueType])
        return values

    def read(self, now: float) -> Pcie:
        before, self._read_at = self._read_at, now
        values = self._values()
        self._look_at_width(values)
        moved = {way: self._counters[way].take(now, value) for way, value in values.items()}
        known = {way: nbytes for way, nbytes in moved.items() if nbytes is not None}
        if before is None:
            return Pcie()
        return Pcie(known, {way: nbytes / (now - before) for way, nbytes in known.items()}, len(known) < len(moved))


class _Gpm:
    name = "gpm"
    period_seconds = PERIOD_SECONDS

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        self._samples = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
        self._read_at: float | None = None

    def read(self, now: float) -> Pcie:
        self._samples.reverse()
        earlier, later = self._samples
        self._nvml.nvmlGpmSampleGet(self._handle, later)
        before, self._read_at = self._read_at, now
        if before is None:
            return Pcie()
        speeds = self._speeds(earlier, later)
        return Pcie({way: round(speed * (now - before)) for way, speed in speeds.items()}, speeds)

    def _speeds(self, earlier: Any, later: Any) -> dict[str, float]:
        wanted = self._nvml.c_nvmlGpmMetricsGet_t()
        wanted.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        wanted.numMetrics = len(GPM_METRICS)
        wanted.sample1, wanted.sample2 = earlier, later
        for i, number in enumerate(GPM_METRICS.values()):
            wanted.metrics[i].metricId = number
        found = self._nvml.nvmlGpmMetricsGet(wanted)
        speeds: dict[str, float] = {}
        for direction, metric in zip(GPM_METRICS, found.metrics, strict=False):
            if metric.nvmlReturn != self._nvml.NVML_SUCCESS:
                raise self._nvml.NVMLError(metric.nvmlReturn)
            speeds[direction] = metric.value * 2**20  # MiB/s
        return speeds

    def close(self) -> None:
        for sample in self._samples:
            self._nvml.nvmlGpmSampleFree(sample)


class _Throughput:
    name = "throughput"
    period_seconds = PERIOD_SECONDS

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._counters = {"h2d": nvml.NVML_PCIE_UTIL_RX_BYTES, "d2h": nvml.NVML_PCIE_UTIL_TX_BYTES}
        self.read(time.monotonic())

    def read(self, now: float) -> Pcie:
        get = self._nvml.nvmlDeviceGetPcieThroughput
        return Pcie({}, {way: get(self._handle, counter) * 1024.0 for way, counter in self._counters.items()})  # KiB/s


class DividedGpuError(Exception):
    """The process works on a part of a GPU (MIG), of which NVML has no figures."""


class Gpu:
    """One GPU, open until `close`. Not to be shared between threads: a reading may block for 40 ms."""

    def __init__(self, nvml: Any, uuid: str) -> None:
        """NVMLError when NVML does not know it, DividedGpuError when it is a part of a GPU."""
        self._nvml = nvml
        nvml.nvmlInit()
        try:
            self._handle = self._whole(uuid)
            self.pcie = self._best_source()
        except BaseException:
            nvml.nvmlShutdown()
            raise
        self._knows_utilization = True

    def _whole(self, uuid: str) -> Any:
        """The GPU's handle. CUDA names a part by its own UUID or by that of the whole GPU, as versions differ."""
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
        fields = self._source(_Fields)
        if fields is not None and fields.period_seconds == PERIOD_SECONDS:
            return fields
        # Counters that may wrap must be read so often that one that needs it less is better.
        return self._source(_Gpm) or fields or self._source(_Throughput)

    def _source(self, kind: type[PcieSource]) -> PcieSource | None:
        try:
            return kind(self._nvml, self._handle)  # type: ignore[call-arg]
        except self._nvml.NVMLError as error:
            log.debug("NVML has no PCIe figures from %s: %s", kind.name, error)
            return None

    def utilization_ratio(self) -> float | None:
        """Share of the last sample period in which a kernel ran; None where NVML does not say."""
        if not self._knows_utilization:
            return None
        try:
            return float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu) / 100
        except self._nvml.NVMLError as error:
            log.info("NVML does not say how busy the GPU is: %s", error)
            self._knows_utilization = False
            return None

    def close(self) -> None:
        if isinstance(self.pcie, _Gpm):
            self.pcie.close()
        self._nvml.nvmlShutdown()


def open_gpu(uuid: str) -> Gpu | None:
    """The GPU with this UUID; None, and the reason in the log, when NVML is not here or does not know it."""
    try:
        import pynvml
    except ImportError:
        log.info("no figures from NVML: nvidia-ml-py is not installed")
        return None
    try:
        return Gpu(pynvml, uuid)
    except DividedGpuError:
        log.warning(
            "GPU %s is divided (MIG): NVML counts for the whole GPU only, so that the figures of utilization and PCIe "
            "are absent. All others are there.",
            uuid,
            extra=event("nvml_absent", gpu=uuid, reason="MIG"),
        )
        return None
    except pynvml.NVMLError as error:
        log.info("no figures from NVML of GPU %s: %s", uuid, error)
        return None


def sums(earlier: Mapping[str, int], more: Mapping[str, int], ways: Sequence[str] = DIRECTIONS) -> dict[str, int]:
    """Both added, for the directions that either knows."""
    return {way: earlier.get(way, 0) + more.get(way, 0) for way in ways if way in earlier or way in more}
