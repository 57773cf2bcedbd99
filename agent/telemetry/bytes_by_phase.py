"""Bytes and seconds of a transfer, divided among the phases in which it was under way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tidegate.agent.devices.base import DoneEvent
from tidegate.agent.tiers.transfers import Transfer
from tidegate.timeline.stall_analysis import Interval, split_by_phase
from tidegate.timeline.timeline import Phase, PhaseSpan


@dataclass(slots=True)
class Moved:
    """What was moved so far, in seconds of transfers under way."""

    nbytes: int = 0
    seconds: float = 0.0


def divided(span: Interval, nbytes: int, phases: Sequence[PhaseSpan]) -> Iterator[tuple[Phase, int, float]]:
    """Phase, bytes and seconds of each part of a transfer, which add up to all of it."""
    left = nbytes
    shares = list(split_by_phase(span, phases).items())
    for i, (phase, share) in enumerate(shares):
        # The last phase takes what rounding left, so that phases add up to what was moved.
        part = left if i == len(shares) - 1 else round(nbytes * share)
        left -= part
        yield phase, part, (span.end - span.start) * share


def moves_by_phase(
    moves: Iterable[tuple[str, Transfer]], phases: Sequence[PhaseSpan]
) -> Iterator[tuple[str, Phase, int, float]]:
    """Operation, phase, bytes and busy seconds of each part of the transfers of one path.

    Where two transfers of one operation overlap, the time is that of the one that began first; bytes are divided over
    all the time that their transfer took.
    """
    busy_until: dict[str, float] = {}
    for operation, transfer in sorted(moves, key=lambda move: move[1].start):
        start = max(transfer.start, busy_until.get(operation, transfer.start))
        end = busy_until[operation] = max(start, transfer.end)
        if start == transfer.start:
            for phase, nbytes, seconds in divided(transfer, transfer.nbytes, phases):
                yield operation, phase, nbytes, seconds
            continue
        for phase, nbytes, _ in divided(transfer, transfer.nbytes, phases):
            yield operation, phase, nbytes, 0.0
        for phase, _, seconds in divided(DoneEvent(start, end), 0, phases):
            yield operation, phase, 0, seconds
