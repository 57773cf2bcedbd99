"""Sums the bytes and seconds of transfers in each phase of a step."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tidegate.timeline.stall_analysis import Interval, split_by_phase
from tidegate.timeline.timeline import Phase, PhaseSpan

Channel = tuple[str, str]
"""Where transfers follow each other: lane of the link and content of the copy, or path and operation."""


def start_of(move: tuple[Channel, Interval]) -> float:
    """When a transfer began: the key with which transfers are sorted for `totals_by_phase`."""
    return move[1].start


class Moved(Interval, Protocol):
    """A transfer: an interval with its bytes."""

    @property
    def nbytes(self) -> int: ...


@dataclass(slots=True)
class TransferTotal:
    """Sum of transferred bytes, and of the seconds with a transfer in progress."""

    nbytes: int = 0
    seconds: float = 0.0


def totals_by_phase(
    moves: Iterable[tuple[Channel, Moved]], phases: Sequence[PhaseSpan]
) -> Mapping[tuple[Channel, Phase], TransferTotal]:
    """The bytes and busy seconds of each channel in each phase. A transfer that crosses a phase boundary is divided in
    proportion to the time.

    Where two transfers of one channel overlap, the common time is counted once, for the transfer that began first. The
    bytes of each transfer are divided over its whole duration. This function runs after every training step and must be
    fast: transfers of one channel must be in the order in which they began.
    """
    totals: defaultdict[tuple[Channel, Phase], TransferTotal] = defaultdict(TransferTotal)
    busy_until: dict[Channel, float] = {}
    starts = [phase.start for phase in phases]
    at, low, high = phases[0].phase, phases[0].start, phases[0].end
    for channel, move in moves:
        start, end = move.start, move.end
        began = busy_until.get(channel, start)
        began = began if began > start else start
        ended = busy_until[channel] = end if end > began else began
        if not (low <= start < high and end <= high):
            # Rare: nearly every transfer lies in the same phase as the one before it.
            phase = phases[max(0, bisect_right(starts, start) - 1)]
            if start < phase.start or end > phase.end:
                for name, nbytes, _ in divide_by_phase(move, move.nbytes, phases):
                    totals[channel, name].nbytes += nbytes
                for name, _, seconds in divide_by_phase(PhaseSpan(at, began, ended), 0, phases):
                    totals[channel, name].seconds += seconds
                continue
            at, low, high = phase.phase, phase.start, phase.end
        total = totals[channel, at]
        total.nbytes += move.nbytes
        total.seconds += ended - began
    return totals


def divide_by_phase(span: Interval, nbytes: int, phases: Sequence[PhaseSpan]) -> Iterator[tuple[Phase, int, float]]:
    """Divides one transfer at phase boundaries in proportion to time. Yields phase, bytes and seconds of each part; the
    parts add up to the whole."""
    left = nbytes
    shares = list(split_by_phase(span, phases).items())
    for i, (phase, share) in enumerate(shares):
        # The last phase takes the rounding error, so that the parts add up to all bytes.
        part = left if i == len(shares) - 1 else round(nbytes * share)
        left -= part
        yield phase, part, (span.end - span.start) * share
