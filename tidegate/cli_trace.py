"""`tidegate trace`: the wire's timeline as the core's type, so that it can be written as a trace."""

from __future__ import annotations

from pathlib import Path

from tidegate.errors import TidegateError
from tidegate.plan.ops import CONTENT_OF, OpKind
from tidegate.timeline import PHASES, PhaseSpan, Span, Timeline
from tidegate.trace import write_trace
from tidegate.wire import TimelineView


def as_timeline(view: TimelineView) -> Timeline:
    """Spans and phases of a kind that this version does not know are left out."""
    known = set(OpKind)
    return Timeline(
        step=view.step,
        source=view.source,
        spans=tuple(
            Span(
                row.op,
                OpKind(row.kind),
                row.lane,
                row.subgroup,
                row.start,
                row.end,
                row.nbytes,
                row.numel,
                CONTENT_OF.get(OpKind(row.kind)),
                row.slot,
            )
            for row in view.spans
            if row.kind in known
        ),
        phases=tuple(PhaseSpan(row.phase, row.start, row.end) for row in view.phases if row.phase in PHASES),
        deps=dict(view.deps),
        origin=view.origin,
    )


def write(view: TimelineView, run: str, rank: int, output: Path) -> None:
    try:
        write_trace(output, [as_timeline(view)], rank=rank, process_name=f"{run} rank {rank}")
    except OSError as error:
        raise TidegateError(f"{output} cannot be written: {error.strerror}.") from error
