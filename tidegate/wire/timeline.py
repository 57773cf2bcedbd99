"""Messages with the timeline of one step, measured or simulated."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tidegate.wire.base import Count, Label, Message, Moment, Whole

MAX_SPANS = 4_000
MAX_DEPS = 200_000
"""Maximum number of dependencies of one op, which may depend on an op of every subgroup."""


class SpanRow(Message):
    """One span: an op of the update on its lane. `start` and `end` are seconds since the timeline's origin."""

    op: Count
    kind: Label
    lane: Label
    subgroup: Whole
    start: Moment
    end: Moment
    nbytes: Count
    numel: Count
    slot: Whole | None = None


class PhaseRow(Message):
    phase: Label
    start: Moment
    end: Moment


class TimelineView(Message):
    """The timeline of one step. Of a long timeline, only the first `MAX_SPANS` spans are sent; `num_spans` is the
    number of all spans, and `deps` are the dependencies of the spans that are sent."""

    step: Count
    source: Literal["measured", "simulated"]
    origin: Moment
    phases: Annotated[tuple[PhaseRow, ...], Field(max_length=10_000)]
    spans: Annotated[tuple[SpanRow, ...], Field(max_length=MAX_SPANS)]
    num_spans: Count
    deps: Annotated[
        dict[Whole, Annotated[tuple[Whole, ...], Field(max_length=MAX_DEPS)]], Field(max_length=10_000)
    ] = {}
