"""Live speeds of the paths, and whether another tier split is worth moving subgroups for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tidegate.plan.tier_split import Counts, PathSpeeds, balanced_split, makespan_seconds
from tidegate.speeds.speed_filter import Settling

MINIMUM_GAIN: Final = 0.05
"""Share of the makespan that a move must promise."""
SATURATED: Final = 0.9
"""Share of a step's time with storage in which a path must have been at work to be what held the step up."""
LOADED: Final = 0.5
"""Share of a step for which a path must have work, as fast as it is known, or it rests for most of it."""
PROBE: Final = 1
"""Subgroups of every path that may have any, or nobody would see that it recovered."""


@dataclass(frozen=True, kw_only=True)
class WholeStep:
    """All that a path did in one step, reads and writes together.

    busy_seconds: in which at least one of its ops was in progress. step_seconds: from the first to the last op of any
    path.
    """

    read_bytes: int
    write_bytes: int
    busy_seconds: float
    step_seconds: float

    @property
    def balanced(self) -> bool:
        """Whether it read about as much as it wrote; while subgroups move it does not."""
        fewer, more = sorted((self.read_bytes, self.write_bytes))
        return 0 < more <= 2 * fewer

    @property
    def saturated(self) -> bool:
        """Whether the path had work all the time: then it shows what it can do."""
        return self.busy_seconds >= SATURATED * self.step_seconds

    def seconds_per_byte(self, duplex: bool) -> float:
        """Busy seconds for each byte that was read and written, as `PathSpeeds.seconds_per_byte` has it.

        Of unequal amounts, the larger one decides where both ways go at once, else their mean.
        """
        amounts = self.read_bytes, self.write_bytes
        return self.busy_seconds / (max(amounts) if duplex else sum(amounts) / 2)


@dataclass(frozen=True, kw_only=True)
class PathTraffic:
    """What one step moved on one path. Seconds are busy: an op was in progress; bytes are counted at the call site.

    The first six are of the part of the step that shows each way's speed; whole: all of it, where that is known.
    shared_read_seconds: those of `read_seconds` in which writes were in progress, too; and the other way round.
    """

    read_bytes: int = 0
    read_seconds: float = 0.0
    write_bytes: int = 0
    write_seconds: float = 0.0
    shared_read_seconds: float = 0.0
    shared_write_seconds: float = 0.0
    whole: WholeStep | None = None


class _Path:
    """What is known of one path: what a byte costs that is read and written once, and how that divides.

    Only a path that is always at work shows its cost. One that rests between its ops serves each of them at once, if
    it is throttled: its reads and writes take at least as long as they did, and at most as long as it was busy in all.
    """

    def __init__(self, speeds: PathSpeeds) -> None:
        self._duplex = speeds.duplex
        self._read = Settling(1 / speeds.read_bytes_per_second)
        self._write = Settling(1 / speeds.write_bytes_per_second)
        self._both = Settling(speeds.seconds_per_byte)

    def observe(self, seen: PathTraffic) -> None:
        read_seconds, write_seconds = seen.read_seconds, seen.write_seconds
        if not self._duplex:
            # A shared device serves both at once at half speed: half of that time belongs to each.
            read_seconds -= seen.shared_read_seconds / 2
            write_seconds -= seen.shared_write_seconds / 2
        read = _way(self._read, seen.read_bytes, read_seconds)
        write = _way(self._write, seen.write_bytes, write_seconds)
        if seen.read_seconds > 0 or seen.write_seconds > 0:
            self._observe_both(max(read, write) if self._duplex else read + write, seen.whole)

    def _observe_both(self, apart: float, whole: WholeStep | None) -> None:
        if whole is None or not whole.balanced:
            self._both.observe(apart, apart)
            return
        together = whole.seconds_per_byte(self._duplex)
        least, most = (together, together) if whole.saturated else sorted((apart, together))
        expected = whole.busy_seconds * self._both.seconds_per_byte / together
        self._both.observe(least, most, rested=expected < LOADED * whole.step_seconds)

    @property
    def speeds(self) -> PathSpeeds:
        """The slower way takes what both together do, at least; where the device is shared, both ways add up to it."""
        read, write, both = self._read.seconds_per_byte, self._write.seconds_per_byte, self._both.seconds_per_byte
        if self._duplex:
            read, write = (both, min(write, both)) if read >= write else (min(read, both), both)
        else:
            read, write = both * read / (read + write), both * write / (read + write)
        return PathSpeeds(read_bytes_per_second=1 / read, write_bytes_per_second=1 / write, duplex=self._duplex)


def _way(known: Settling, nbytes: int, seconds: float) -> float:
    """What a byte took, which is taken in; as it is known where nothing moved."""
    if nbytes <= 0 or seconds <= 0:
        return known.seconds_per_byte
    known.observe(seconds / nbytes, seconds / nbytes)
    return seconds / nbytes


class SplitEstimator:
    """Estimates the speeds of paths step by step, and proposes another split only for a gain that is worth it.

    rates: as calibrated, in the order of the paths; what is never seen keeps them. Deterministic: the same calls give
    the same proposals. Not thread-safe.
    """

    def __init__(self, rates: Mapping[str, PathSpeeds], *, minimum_gain: float = MINIMUM_GAIN) -> None:
        self._paths = {name: _Path(rate) for name, rate in rates.items()}
        self._minimum_gain = minimum_gain

    @property
    def rates(self) -> dict[str, PathSpeeds]:
        """The present estimate."""
        return {name: path.speeds for name, path in self._paths.items()}

    def observe(self, traffic: Mapping[str, PathTraffic]) -> None:
        """Takes in one step. A path or a direction that moved nothing keeps its last speed."""
        for name, seen in traffic.items():
            self._paths[name].observe(seen)

    def propose(self, counts: Mapping[str, int], *, capacity: Mapping[str, int] | None = None) -> Counts | None:
        """The better split of as many subgroups, or None to stay with `counts`.

        A path that may have any keeps at least PROBE. capacity: most subgroups of each path, 0 to close it; when
        `counts` no longer fit, a split is proposed whatever it gains. CapacityError when none fits.
        """
        rates, limits = self.rates, capacity or {}
        best = balanced_split(sum(counts.values()), rates, capacity=limits, minimum=PROBE)
        if any(n > limits.get(name, n if name in rates else 0) for name, n in counts.items()):
            return best
        usable = [name for name in rates if limits.get(name, 1) > 0]
        if all(best[name] for name in usable) and not all(counts.get(name) for name in usable):
            return best
        now, then = makespan_seconds(counts, rates, 1), makespan_seconds(best, rates, 1)
        return best if then < (1 - self._minimum_gain) * now else None
