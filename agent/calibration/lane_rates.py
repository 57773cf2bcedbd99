"""How much a lane does in a second: alone, and while another lane works as hard as it can."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Final, NamedTuple

SHARE_DIGITS: Final = 3


@dataclass(frozen=True)
class Load:
    """Work of one lane. `once` does a piece of it and says how much that was, in parameters or bytes; `few` does a
    piece that is much smaller."""

    lane: str
    once: Callable[[], float]
    few: Callable[[], float] | None = None


class Ops(NamedTuple):
    """What a lane does alone: an op takes `op_seconds` and, for each byte or parameter, 1 / `rate`."""

    rate: float
    op_seconds: float
    once: float
    """In a second, in the pieces in which it was measured: less than `rate`."""


@dataclass
class Round:
    """What lanes did in a second, each alone and two at a time, one after the other within seconds."""

    alone: dict[str, Ops]
    together: dict[tuple[str, str], tuple[float, float]]


def rate(once: Callable[[], float], seconds: float) -> float:
    """What is done in a second, over at least `seconds`. The first piece, which finds everything cold, is left out."""
    each, amount = paced(once, seconds)
    return amount / each


def paced(once: Callable[[], float], seconds: float) -> tuple[float, float]:
    """Seconds of each piece, and how much it is: means, over at least `seconds`, without the first piece."""
    once()
    pieces, amount, began = 0, 0.0, time.monotonic()
    while (elapsed := time.monotonic() - began) < seconds or not amount:
        amount += once()
        pieces += 1
    return elapsed / pieces, amount / pieces


def ops(load: Load, seconds: float) -> Ops:
    """From pieces of two sizes, where there are two; the smaller ones are measured for a third of `seconds`."""
    large, nbytes = paced(load.once, seconds)
    if load.few is None:
        return Ops(nbytes / large, 0.0, nbytes / large)
    small, few = paced(load.few, seconds / 3)
    if few >= nbytes or small >= large:  # too small to tell
        return Ops(nbytes / large, 0.0, nbytes / large)
    found = (nbytes - few) / (large - small)
    return Ops(found, max(0.0, small - few / found), nbytes / large)


def together(works: Sequence[Callable[[], float]], seconds: float) -> list[float]:
    """`rate` of each while all of them are done at once, each by a thread of its own: all begin together, and nobody
    rests before all have been counted. An error of any is raised."""
    begun, left = threading.Barrier(len(works)), len(works)
    counted, failed = threading.Condition(), list[BaseException]()
    found = [0.0] * len(works)

    def work(place: int, once: Callable[[], float]) -> None:
        nonlocal left
        begun.wait()
        try:
            found[place] = rate(once, seconds)
        except BaseException as error:
            failed.append(error)
        finally:
            with counted:
                left -= 1
        try:
            while left and not failed:  # it did what was counted
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
) -> Round:
    """Each lane alone, then each two of `loads`."""
    alone: dict[str, Ops] = {}
    for load in (*loads, *alone_only):
        progress(f"{load.lane} alone")
        alone[load.lane] = ops(load, seconds)
    pairs: dict[tuple[str, str], tuple[float, float]] = {}
    for one, other in combinations(loads, 2):
        progress(f"{one.lane} beside {other.lane}")
        first, second = together([one.once, other.once], seconds)
        pairs[one.lane, other.lane] = first, second
    return Round(alone, pairs)


def typical(rounds: Sequence[Round]) -> tuple[dict[str, Ops], dict[str, dict[str, float]]]:
    """What each lane does alone, and `keeps`: medians of the rounds. Shares are of rates of the same round: what others
    do on the machine meanwhile changes from one to the next."""
    alone = {
        lane: Ops(*map(median, zip(*(one.alone[lane] for one in rounds), strict=True))) for lane in rounds[0].alone
    }
    keeps: dict[str, dict[str, float]] = {}
    for one, other in rounds[0].together:
        for place, (lane, beside) in enumerate(((one, other), (other, one))):
            share = median(r.together[one, other][place] / r.alone[lane].once for r in rounds)
            keeps.setdefault(lane, {})[beside] = _share(share)
    return alone, keeps


def _share(kept: float) -> float:
    """What is kept of a speed: noise never makes it more than all."""
    return min(1.0, max(10.0**-SHARE_DIGITS, round(kept, SHARE_DIGITS)))
