"""Estimates the speeds of the storage paths from the traffic of each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from tidegate.plan.interference import PairFactors, both_seconds
from tidegate.plan.tier_split import PathSpeeds
from tidegate.speeds.speed_filter import SpeedFilter

SATURATED_SHARE: Final = 0.9
"""Share of a step's storage time for which a path must be busy to count as the bottleneck."""
IDLE_SHARE: Final = 0.5
"""Limit for a path to count as loaded, as a share of a step's storage time. If the path's work takes less time than
that at its estimated speed, the path counts as idle."""


FEW_TRANSFERS: Final = 4
"""Fewest transfers of a path in a step that show its speed, unless they are large (LITTLE_BYTES)."""
LITTLE_BYTES: Final = 64 << 20
"""Fewest bytes that show the speed of a path with less than FEW_TRANSFERS transfers."""


@dataclass(frozen=True, kw_only=True)
class PathStepTotals:
    """The work of one path in one whole step, reads and writes together.

    busy_seconds: time in which at least one op of the path was running. step_seconds: the step's storage time, from the
    first to the last op of any path.
    """

    read_bytes: int
    write_bytes: int
    busy_seconds: float
    step_seconds: float

    @property
    def balanced(self) -> bool:
        """Whether bytes read and written differ by at most a factor of 2. They differ by more while subgroups move to
        other paths."""
        fewer, more = sorted((self.read_bytes, self.write_bytes))
        return 0 < more <= 2 * fewer

    @property
    def saturated(self) -> bool:
        """Whether the path was busy nearly all the time, so that its throughput is its speed."""
        return self.busy_seconds >= SATURATED_SHARE * self.step_seconds

    def seconds_per_byte(self, factors: PairFactors) -> float:
        """Busy seconds for each byte that was read once and written once; comparable with
        `PathSpeeds.seconds_per_byte`.

        factors: the interference factors of reads and writes. If the numbers of bytes read and written differ, their
        mean counts where both directions share the bandwidth, the larger number where neither slows the other down.
        """
        moved = both_seconds(self.read_bytes, self.write_bytes, factors) / both_seconds(1, 1, factors)
        return self.busy_seconds / moved


@dataclass(frozen=True, kw_only=True)
class PathTraffic:
    """The bytes and busy seconds of one path in one step. Busy seconds are those in which an op of the path was
    running.

    `whole` has the figures of the whole step; None if they are not known. All other fields belong to only a part of the
    step: the part from which the speeds of reads and of writes are measured. shared_read_seconds: the part of
    `read_seconds` in which writes were running, too; shared_write_seconds: the part of `write_seconds` in which reads
    were running, too.
    """

    read_bytes: int = 0
    read_seconds: float = 0.0
    write_bytes: int = 0
    write_seconds: float = 0.0
    shared_read_seconds: float = 0.0
    shared_write_seconds: float = 0.0
    whole: PathStepTotals | None = None
    transfers: int = FEW_TRANSFERS
    """Reads and writes of the whole step."""

    @property
    def little(self) -> bool:
        """Whether the speeds rest on few and small transfers. Then the fixed costs of one transfer, such as a wait for
        a lock or for a device that slept, look like a low speed."""
        return self.transfers < FEW_TRANSFERS and self.read_bytes + self.write_bytes < LITTLE_BYTES


class _PathEstimate:
    """Estimates the speed of one path from measured steps: the seconds for a byte that is read once and written once,
    and the shares of reading and of writing in these seconds.

    Only a path that is always busy shows its true speed: a throttled path with pauses between its ops serves each op at
    once and looks faster. So if the path was not always busy, a step gives only a range for the seconds per byte. Its
    ends are computed from the times of each direction (`both_seconds`), and from the busy time of the whole step.
    """

    def __init__(self, speeds: PathSpeeds) -> None:
        self._initial = speeds
        self._read = SpeedFilter(1 / speeds.read_bytes_per_second)
        self._write = SpeedFilter(1 / speeds.write_bytes_per_second)
        self._both = SpeedFilter(speeds.seconds_per_byte)

    def observe(self, seen: PathTraffic) -> None:
        factors = self._initial.factors
        # The seconds that each direction would have needed alone: its factor gives its speed in shared time.
        read_seconds = seen.read_seconds - (1 - factors[0]) * seen.shared_read_seconds
        write_seconds = seen.write_seconds - (1 - factors[1]) * seen.shared_write_seconds
        read = _observe_direction(self._read, seen.read_bytes, read_seconds, little=seen.little)
        write = _observe_direction(self._write, seen.write_bytes, write_seconds, little=seen.little)
        if seen.read_seconds > 0 or seen.write_seconds > 0:
            self._observe_both(both_seconds(read, write, factors), seen.whole, little=seen.little)

    def _observe_both(self, apart: float, whole: PathStepTotals | None, *, little: bool) -> None:
        if whole is None or not whole.balanced:
            self._both.observe(apart, apart, little=little)
            return
        together = whole.seconds_per_byte(self._initial.factors)
        least, most = (together, together) if whole.saturated else sorted((apart, together))
        expected = whole.busy_seconds * self._both.seconds_per_byte / together
        self._both.observe(least, most, rested=expected < IDLE_SHARE * whole.step_seconds, little=little)

    @property
    def speeds(self) -> PathSpeeds:
        """The estimated speeds of both directions. They agree with the estimated time for a byte that is read once and
        written once."""
        read, write, both = self._read.seconds_per_byte, self._write.seconds_per_byte, self._both.seconds_per_byte
        read, write = _agreeing(read, write, both, self._initial.factors)
        return replace(self._initial, read_bytes_per_second=1 / read, write_bytes_per_second=1 / write)


def _agreeing(read: float, write: float, both: float, factors: PairFactors) -> tuple[float, float]:
    """Scales the times of both directions (`read`, `write`) so that `both_seconds` of the new times is `both`.

    If the times add up (for example with factors of 1/2), both change in the same proportion. If neither direction
    slows the other down (factors of 1), the longer time becomes `both`, and the shorter time changes only if it is
    longer than `both`. Other factors give a result between these two.
    """
    factor, other_factor = factors
    if read / factor > write / other_factor:
        return _agreeing(write, read, both, (other_factor, factor))[::-1]
    weight = min(1.0, (1 - other_factor) / factor)
    scale = both / both_seconds(read, write, factors)
    read = min(read * scale**weight, max(factor, 1 - other_factor) * both)
    return read, both - weight * read


def _observe_direction(known: SpeedFilter, nbytes: int, seconds: float, *, little: bool) -> float:
    """Updates the estimate `known` of one direction with `nbytes` moved in `seconds`, and returns the measured seconds
    per byte. If no bytes moved, returns the old estimate."""
    if nbytes <= 0 or seconds <= 0:
        return known.seconds_per_byte
    known.observe(seconds / nbytes, seconds / nbytes, little=little)
    return seconds / nbytes


class PathSpeedEstimator:
    """Estimates the speeds of the paths from step to step.

    rates: calibrated speeds, in the order of the paths; they stay for a path that is never measured. Deterministic: the
    same calls give the same estimates. Not thread-safe.
    """

    def __init__(self, rates: Mapping[str, PathSpeeds]) -> None:
        self._paths = {name: _PathEstimate(rate) for name, rate in rates.items()}

    @property
    def rates(self) -> dict[str, PathSpeeds]:
        """The estimated speeds of the paths, by name."""
        return {name: path.speeds for name, path in self._paths.items()}

    def observe(self, traffic: Mapping[str, PathTraffic]) -> None:
        """Adds one step. A path or a direction without bytes keeps its last estimate."""
        for name, seen in traffic.items():
            self._paths[name].observe(seen)
