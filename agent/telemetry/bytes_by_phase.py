"""Divides the bytes and seconds of transfers among the phases of a step, by the time in each phase."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tidegate.agent.devices.base import DoneEvent
from tidegate.agent.tiers.transfers import Transfer
from tidegate.timeline.stall_analysis import Interval, split_by_phase
from tidegate.timeline.timeline import Phase, PhaseSpan


@dataclass(slots=True)
class TransferTotal:
    """Sum of transferred bytes, and of the seconds with a transfer in progress."""

    nbytes: int = 0
    seconds: float = 0.0


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


def transfers_by_phase(
    moves: Iterable[tuple[str, Transfer]], phases: Sequence[PhaseSpan]
) -> Iterator[tuple[str, Phase, int, float]]:
    """Divides the transfers of one path at phase boundaries. `moves`: operation (read or write) and transfer. Yields
    operation, phase, bytes and busy seconds of each part.

    Where two transfers of one operation overlap, the common time is counted once, for the transfer that began first.
    The bytes of each transfer are divided over its whole duration.
    """
    busy_until: dict[str, float] = {}
    for operation, transfer in sorted(moves, key=lambda move: move[1].start):
        start = max(transfer.start, busy_until.get(operation, transfer.start))
        end = busy_until[operation] = max(start, transfer.end)
        if start == transfer.start:
            for phase, nbytes, seconds in divide_by_phase(transfer, transfer.nbytes, phases):
                yield operation, phase, nbytes, seconds
            continue
        for phase, nbytes, _ in divide_by_phase(transfer, transfer.nbytes, phases):
            yield operation, phase, nbytes, 0.0
        for phase, _, seconds in divide_by_phase(DoneEvent(start, end), 0, phases):
            yield operation, phase, 0, seconds
