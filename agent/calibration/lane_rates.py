"""Throughput of lanes: each alone, and while another lane works at full speed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Final, NamedTuple

SHARE_DIGITS: Final = 3
"""Number of decimal digits to which an interference factor is rounded (the speed of a lane while another lane works,
divided by its speed alone)."""


@dataclass(frozen=True)
class Load:
    """Workload of one lane. `once` does one piece of work and returns its amount, in parameters or bytes; `small` does
    the same with a much smaller piece. `small` is None if the workload has pieces of one size only."""

    lane: str
    once: Callable[[], float]
    small: Callable[[], float] | None = None


class LaneThroughput(NamedTuple):
    """Throughput of a lane that works alone: an op takes `op_seconds` (the fixed cost), plus 1 / `rate` seconds for
    each byte or parameter."""

    rate: float
    op_seconds: float
    once: float
    """Bytes or parameters per second for ops of the measured size, with the fixed cost of each op. It is less than
    `rate`, or equal to it if no fixed cost was measured."""


@dataclass
class MeasurementRound:
    """Results of one round: amounts (bytes or parameters) per second of each lane alone, and of each pair of lanes that
    work at the same time. All are measured within a short time."""

    alone: dict[str, LaneThroughput]
    together: dict[tuple[str, str], tuple[float, float]]


def rate(once: Callable[[], float], seconds: float) -> float:
    """Amount of work per second, measured over at least `seconds`. The first piece is not counted, because caches are
    cold."""
    each, amount = mean_per_piece(once, seconds)
    return amount / each


def mean_per_piece(once: Callable[[], float], seconds: float) -> tuple[float, float]:
    """Mean duration in seconds and mean amount of a piece of work, measured over at least `seconds`. The first piece is
    not counted."""
    once()
    pieces, amount, began = 0, 0.0, time.monotonic()
    while (elapsed := time.monotonic() - began) < seconds or not amount:
        amount += once()
        pieces += 1
    return elapsed / pieces, amount / pieces


def lane_throughput(load: Load, seconds: float) -> LaneThroughput:
    """Measures the rate of a lane, and its fixed cost per op if the load has pieces of two sizes. Small pieces are
    measured for a third of `seconds`."""
    large, nbytes = mean_per_piece(load.once, seconds)
    if load.small is None:
        return LaneThroughput(nbytes / large, 0.0, nbytes / large)
    small, small_nbytes = mean_per_piece(load.small, seconds / 3)
    if small_nbytes >= nbytes or small >= large:  # the difference is too small to measure
        return LaneThroughput(nbytes / large, 0.0, nbytes / large)
    slope = (nbytes - small_nbytes) / (large - small)
    return LaneThroughput(slope, max(0.0, small - small_nbytes / slope), nbytes / large)


def rates_together(works: Sequence[Callable[[], float]], seconds: float) -> list[float]:
    """Measures all workloads while they run at once, each in a thread of its own, and returns the amount of work per
    second of each. All begin together, and all keep working until all are measured. The first error is raised."""
    begun, left = threading.Barrier(len(works)), len(works)
    counted, failed = threading.Condition(), list[BaseException]()
    found = [0.0] * len(works)

    def work(index: int, once: Callable[[], float]) -> None:
        nonlocal left
        begun.wait()
        try:
            found[index] = rate(once, seconds)
        except BaseException as error:
            failed.append(error)
        finally:
            with counted:
                left -= 1
        try:
            while left and not failed:  # its rate is measured: it only keeps the lane busy
                once()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=one, name="tidegate-calibrate") for one in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return found


def measure(
    loads: Sequence[Load], alone_only: Sequence[Load], seconds: float, progress: Callable[[str], None]
) -> MeasurementRound:
    """One round of measurements: each lane alone, then each pair of lanes in `loads`. alone_only: loads that are not
    measured in pairs."""
    alone: dict[str, LaneThroughput] = {}
    for load in (*loads, *alone_only):
        progress(f"{load.lane} alone")
        alone[load.lane] = lane_throughput(load, seconds)
    pairs: dict[tuple[str, str], tuple[float, float]] = {}
    for one, other in combinations(loads, 2):
        progress(f"{one.lane} beside {other.lane}")
        first, second = rates_together([one.once, other.once], seconds)
        pairs[one.lane, other.lane] = first, second
    return MeasurementRound(alone, pairs)


def medians(rounds: Sequence[MeasurementRound]) -> tuple[dict[str, LaneThroughput], dict[str, dict[str, float]]]:
    """Medians over all rounds: the throughput of each lane alone, and the interference factors. `keeps[lane][other]` is
    the speed of `lane` while `other` works, divided by its speed alone. Both speeds are from the same round, because
    the background load differs between rounds."""
    alone = {
        lane: LaneThroughput(*map(median, zip(*(one.alone[lane] for one in rounds), strict=True)))
        for lane in rounds[0].alone
    }
    keeps: dict[str, dict[str, float]] = {}
    for one, other in rounds[0].together:
        for index, (lane, beside) in enumerate(((one, other), (other, one))):
            share = median(r.together[one, other][index] / r.alone[lane].once for r in rounds)
            keeps.setdefault(lane, {})[beside] = _share(share)
    return alone, keeps


def _share(kept: float) -> float:
    """Rounds an interference factor (the speed of a lane while another lane works, divided by its speed alone) to
    SHARE_DIGITS decimal digits. The result is above 0 and at most 1, even if noise gives another value."""
    return min(1.0, max(10.0**-SHARE_DIGITS, round(kept, SHARE_DIGITS)))
