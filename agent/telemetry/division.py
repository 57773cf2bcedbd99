"""Bytes and seconds of a transfer, divided among the phases in which it was under way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tidegate.analysis import Interval, split_by_phase
from tidegate.timeline import Phase, PhaseSpan


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
