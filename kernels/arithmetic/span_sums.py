"""Sums over the spans of a step in native code. They run after every training step, on the cores of the training. The
overhead of steps of 0.3 s has no room for more under its bound (`docs/decisions/telemetry.md`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tidegate.kernels import _native
from tidegate.plan.ops import Content, OpKind
from tidegate.speeds.rate_card import RATE_NAME_OF, RATE_OF, MeasuredWork, rate_name
from tidegate.timeline.bytes_by_phase import TransferTotal
from tidegate.timeline.stall_analysis import busy_seconds
from tidegate.timeline.timeline import Phase, PhaseSpan

SpanTable = _native.SpanTable
"""The spans of one step, read once for several sums. Its argument: the spans, as `Span`; TypeError for anything
else."""
_RATES: Final[dict[OpKind, tuple[str, bool]]] = {kind: (name, kind in RATE_OF) for kind, name in RATE_NAME_OF.items()}
"""The rate of each kind of op, and whether its amount is a number of parameters, not of bytes."""


def link_totals(spans: SpanTable, phases: Sequence[PhaseSpan]) -> dict[tuple[str, Content, Phase], TransferTotal]:
    """The bytes and busy seconds of the copies between host and device, by lane, content and phase. Equals the Python
    function `tidegate.timeline.bytes_by_phase.totals_by_phase` for the channels (lane, content).

    spans: in the order in which those of each lane began. phases: one or more, which follow each other.
    """
    return {
        (lane, content, phase): TransferTotal(nbytes, seconds)
        for lane, content, phase, nbytes, seconds in _native.link_totals(spans, phases)
    }


def measured_work(spans: SpanTable) -> MeasuredWork:
    """The amount and the busy seconds of each rate in one step. Equals the Python function
    `tidegate.speeds.rate_card.measured_work` to the last bit."""
    work: MeasuredWork
    work, overlapping = _native.measured_work(spans, _RATES)
    for name in overlapping:
        work[name] = (work[name][0], busy_seconds([span for span in spans.spans if rate_name(span) == name]))
    return work


def bytes_of_kind(spans: SpanTable, kind: OpKind, skipped: int) -> tuple[int, int]:
    """Bytes that the ops of one kind have moved, without the first `skipped` spans. Returns two numbers: the bytes of
    the last run of each op, and the bytes of its earlier runs."""
    return spans.bytes_of_kind(kind, skipped)
