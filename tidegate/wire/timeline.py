"""The spans of one step, measured or simulated."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tidegate.wire.base import Count, Finite, Label, Message, Whole

MAX_SPANS = 4_000


class SpanRow(Message):
    """One span of the last update on its lane, seconds since the timeline's origin."""

    op: Count
    kind: Label
    lane: Label
    subgroup: Whole
    start: Finite
    end: Finite
    nbytes: Count
    numel: Count
    slot: Whole | None = None


class PhaseRow(Message):
    phase: Label
    start: Finite
    end: Finite


class TimelineView(Message):
    """A timeline on the wire. Long ones are cut to their first `MAX_SPANS` spans; `num_spans` counts them all, `deps`
    are those of the spans that are sent."""

    step: Count
    source: Literal["measured", "simulated"]
    origin: Finite
    phases: Annotated[tuple[PhaseRow, ...], Field(max_length=10_000)]
    spans: Annotated[tuple[SpanRow, ...], Field(max_length=MAX_SPANS)]
    num_spans: Count
    deps: Annotated[dict[int, tuple[Whole, ...]], Field(max_length=10_000)] = {}
