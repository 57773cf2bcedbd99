"""One finished step of one rank, as the agent tells it: seconds, bytes and what the update waited for."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tidegate.wire.base import (
    Count,
    CountBy,
    Duration,
    DurationBy,
    Flag,
    Label,
    Message,
    Moment,
    Number,
    PathName,
    Speed,
    Text,
)

PathOperation = Literal["read", "write"]


class StallRow(Message):
    phase: Label
    cause: Label
    seconds: Duration


class LinkRow(Message):
    direction: Label
    phase: Label
    content: Label
    bytes: Count
    busy_seconds: Duration


class PathRow(Message):
    """What one step read from or wrote to one path in one phase; bytes as they were moved, padding included."""

    path: PathName
    operation: PathOperation
    phase: Label
    bytes: Count
    busy_seconds: Duration


class PathState(Message):
    """One storage path; sums are since the run began."""

    path: PathName
    free_bytes: Count | None = None
    """None where no bound is known."""
    bytes: dict[PathOperation, Count] = {}
    lock_wait_seconds: dict[PathOperation, Duration] = {}
    errors: dict[PathOperation, Count] = {}
    """Attempts that failed, those that were repeated included."""
    ceiling_bytes_per_second: dict[PathOperation, Speed] = {}
    """What it could do alone when the run began."""
    written_bytes_per_day: Speed | None = None
    """At the pace of the last hour; None while it is too early to tell."""
    retired: Flag = False
    """It failed for good: nothing more is written there."""
    capacity_subgroups: Count | None = None
    """How many subgroups it can hold, with those that it holds already, as the step was planned. None where that is
    more than there can be."""


class StepReport(Message):
    """One finished step. Keys of `phase_seconds` are phases; the others are lists of rows."""

    step: Count
    timestamp: Moment
    phase_seconds: DurationBy
    exposed_seconds: DurationBy = {}
    stalls: Annotated[tuple[StallRow, ...], Field(max_length=1024)] = ()
    spill_seconds: Duration = 0.0
    """How long the update went on after `step()` had returned."""
    links: Annotated[tuple[LinkRow, ...], Field(max_length=1024)] = ()
    paths: Annotated[tuple[PathRow, ...], Field(max_length=1024)] = ()
    path_states: Annotated[tuple[PathState, ...], Field(max_length=64)] = ()
    """One for each storage path, as the step ended."""
    device_memory_peak_bytes: CountBy = {}
    host_memory_bytes: CountBy = {}
    cpu_seconds: DurationBy = {}
    update_params: CountBy = {}
    """By processor: cpu, device."""
    subgroups: CountBy = {}
    """By residence: host, device, or the name of a path."""
    loss: Number | None = None
    tokens: Count | None = None
    grad_norm: Number | None = None
    skipped: Flag = False
    verdict: Text = ""
    """What the update waited for, with figures, and the knob to turn, as a sentence without a final stop."""
