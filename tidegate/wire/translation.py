"""Conversion of timelines between messages (`TimelineView`) and the type that analysis and trace use (`Timeline`)."""

from __future__ import annotations

from dataclasses import replace

from tidegate.plan.ops import CONTENT_OF, OpKind
from tidegate.timeline.step_record import FinishedStep
from tidegate.timeline.timeline import PHASES, PhaseSpan, Span, Timeline
from tidegate.wire.timeline import MAX_SPANS, TimelineView


def as_timeline(view: TimelineView) -> Timeline:
    """The message as a `Timeline`. Spans and phases of kinds that this version does not know are left out."""
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


def as_view(timeline: Timeline, zero: float = 0.0) -> TimelineView:
    """The timeline as a message, with the first MAX_SPANS spans and their dependencies. `zero`: time of the timeline
    that is second 0 of the message. pydantic validates dicts in one call, which takes half the time of creating an
    object for each row."""
    sent = timeline.spans[:MAX_SPANS]
    return TimelineView.model_validate({
        "step": timeline.step,
        "source": timeline.source,
        "origin": timeline.origin + zero,
        "phases": [{"phase": p.phase, "start": p.start - zero, "end": p.end - zero} for p in timeline.phases],
        "spans": [
            {
                "op": s.op, "kind": s.kind, "lane": s.lane, "subgroup": s.subgroup, "start": s.start - zero,
                "end": s.end - zero, "nbytes": s.nbytes, "numel": s.numel, "slot": s.slot,
            }
            for s in sent
        ],
        "num_spans": len(timeline.spans),
        "deps": {s.op: deps for s in sent if (deps := timeline.deps.get(s.op))},
    })  # fmt: skip


def view_of(step: FinishedStep) -> TimelineView:
    """The measured timeline of a step as a message, with times relative to the start of the step."""
    return as_view(replace(step.monotonic_timeline, phases=step.phases.with_tail), step.zero)
