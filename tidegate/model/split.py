"""Live speeds of the paths, and whether another tier split is worth moving subgroups for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from tidegate.plan.split import Counts, PathSpeeds, balanced_split, makespan_seconds

MINIMUM_GAIN: Final = 0.05
"""Share of the makespan that a move must promise."""
SMOOTHING: Final = 0.125
"""Weight of the newest step: noise of ±10 % a step leaves about ±1.5 %, far less than a move must promise."""
JUMP: Final = 0.25
"""A step that is off by more is no noise. One is forgotten; a second one on the same side is the new speed."""
RISE: Final = 2.0
"""How many times as fast as known a path may be taken for in one step."""
BELIEVED: Final = 8
"""Steps that a rise must last. After one that did not, no other is believed for `DISTRUST` steps, then for twice as
many, up to `MOST_DISTRUST`."""
DISTRUST: Final = 16
MOST_DISTRUST: Final = 512
PROBE: Final = 1
"""Subgroups of every path that may have any, or nobody would see that it recovered."""


@dataclass(frozen=True, kw_only=True)
class PathTraffic:
    """What one step moved on one path. Seconds are busy: an op was in progress; bytes are counted at the call site.

    shared_read_seconds: those of `read_seconds` in which writes were in progress, too; and the other way round.
    """

    read_bytes: int = 0
    read_seconds: float = 0.0
    write_bytes: int = 0
    write_seconds: float = 0.0
    shared_read_seconds: float = 0.0
    shared_write_seconds: float = 0.0


class _Speed:
    """Seconds per byte of one direction: times add up, rates do not.

    A path that is throttled, or has a cache, serves its first bytes at once: while it gets little it looks fast, and
    once it gets more it is slow. So a rise is believed by degrees, and one that did not last makes the next one wait.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self.seconds_per_byte = 1 / bytes_per_second
        self._suspect: float | None = None
        self._step = 0
        self._rose_at = -BELIEVED
        self._distrust = DISTRUST
        self._no_rise_before = 0

    def observe(self, nbytes: int, seconds: float) -> None:
        self._step += 1
        if nbytes <= 0 or seconds <= 0:
            return
        seen = seconds / nbytes
        side = self._side(seen)
        if not side:
            self.seconds_per_byte += SMOOTHING * (seen - self.seconds_per_byte)
            self._suspect = None
        elif side < 0 and self._step < self._no_rise_before:
            self._suspect = None
        elif self._suspect is not None and self._side(self._suspect) == side:
            self._jump(seen, side)
        else:
            self._suspect = seen

    def _jump(self, seen: float, side: int) -> None:
        if side > 0:
            self.seconds_per_byte, self._suspect = seen, None
            if self._step - self._rose_at < BELIEVED:
                self._no_rise_before = self._step + self._distrust
                self._distrust = min(2 * self._distrust, MOST_DISTRUST)
            return
        self._rose_at = self._step
        self.seconds_per_byte = max(seen, self.seconds_per_byte / RISE)
        # Where that was not all of it, the next step need not be confirmed again.
        self._suspect = seen if seen < self.seconds_per_byte else None

    def _side(self, seen: float) -> int:
        """1 for much slower than known, -1 for much faster, 0 for as known."""
        ratio = seen / self.seconds_per_byte
        return (ratio > 1 + JUMP) - (ratio < 1 / (1 + JUMP))


class SplitEstimator:
    """Estimates the speeds of paths step by step, and proposes another split only for a gain that is worth it.

    rates: as calibrated, in the order of the paths; what is never seen keeps them. Deterministic: the same calls give
    the same proposals. Not thread-safe.
    """

    def __init__(self, rates: Mapping[str, PathSpeeds], *, minimum_gain: float = MINIMUM_GAIN) -> None:
        self._duplex = {name: rate.duplex for name, rate in rates.items()}
        self._reads = {name: _Speed(rate.read_bytes_per_second) for name, rate in rates.items()}
        self._writes = {name: _Speed(rate.write_bytes_per_second) for name, rate in rates.items()}
        self._minimum_gain = minimum_gain

    @property
    def rates(self) -> dict[str, PathSpeeds]:
        """The present estimate."""
        return {
            name: PathSpeeds(
                read_bytes_per_second=1 / self._reads[name].seconds_per_byte,
                write_bytes_per_second=1 / self._writes[name].seconds_per_byte,
                duplex=duplex,
            )
            for name, duplex in self._duplex.items()
        }

    def observe(self, traffic: Mapping[str, PathTraffic]) -> None:
        """Takes in one step. A path or a direction that moved nothing keeps its last speed."""
        for name, seen in traffic.items():
            if not self._duplex[name]:
                # A shared device serves both at once at half speed: half of that time belongs to each.
                seen = replace(
                    seen,
                    read_seconds=seen.read_seconds - seen.shared_read_seconds / 2,
                    write_seconds=seen.write_seconds - seen.shared_write_seconds / 2,
                )
            self._reads[name].observe(seen.read_bytes, seen.read_seconds)
            self._writes[name].observe(seen.write_bytes, seen.write_seconds)

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
