"""Messages about one finished step of one rank, as reported by the agent: seconds, bytes and stalls."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Annotated, Literal, TypeVar

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
from tidegate.wire.stall_causes import StallCause

PathOperation = Literal["read", "write"]
_Key = TypeVar("_Key", bound=Hashable)
_Row = TypeVar("_Row", "LinkRow", "PathRow")


class StallRow(Message):
    phase: Label
    cause: StallCause
    seconds: Duration


class LinkRow(Message):
    direction: Label
    phase: Label
    content: Label
    bytes: Count
    busy_seconds: Duration


class PathRow(Message):
    """Reads or writes of one path in one phase of a step. Bytes include padding."""

    path: PathName
    operation: PathOperation
    phase: Label
    bytes: Count
    busy_seconds: Duration


class PathState(Message):
    """State of one storage path; sums are since the run began."""

    path: PathName
    free_bytes: Count | None = None
    """Free space for more state; None where no bound is known."""
    bytes: dict[PathOperation, Count] = {}
    lock_wait_seconds: dict[PathOperation, Duration] = {}
    errors: dict[PathOperation, Count] = {}
    """Number of failed attempts to read or write. Also counts failures after which a repeated attempt succeeded."""
    ceiling_bytes_per_second: dict[PathOperation, Speed] = {}
    """Speed of the path alone, measured when the run began."""
    written_bytes_per_day: Speed | None = None
    """Bytes written per day, extrapolated from the last hour; None while it is too early for an estimate."""
    retired: Flag = False
    """Whether the path has failed permanently, so that no more state is written to it."""
    capacity_subgroups: Count | None = None
    """Number of subgroups that the path could hold when the step was planned, including those that it held already.
    None where no limit is known, or where the limit is more than the largest number of subgroups of a rank."""


class StepReport(Message):
    """One finished step of a rank.

    Keys of `phase_seconds`, `exposed_seconds`, `cpu_seconds` and `device_memory_peak_bytes` are phases; keys of
    `host_memory_bytes` are kinds of memory.
    """

    step: Count
    timestamp: Moment
    phase_seconds: DurationBy
    exposed_seconds: DurationBy = {}
    stalls: Annotated[tuple[StallRow, ...], Field(max_length=1024)] = ()
    spill_seconds: Duration = 0.0
    """Seconds for which the update continued after `step()` had returned."""
    links: Annotated[tuple[LinkRow, ...], Field(max_length=1024)] = ()
    paths: Annotated[tuple[PathRow, ...], Field(max_length=1024)] = ()
    path_states: Annotated[tuple[PathState, ...], Field(max_length=64)] = ()
    """State of each storage path when the step ended."""
    device_memory_peak_bytes: CountBy = {}
    host_memory_bytes: CountBy = {}
    cpu_seconds: DurationBy = {}
    update_params: CountBy = {}
    """Updated parameters by processor: cpu, device."""
    subgroups: CountBy = {}
    """Number of subgroups by residence: host, device, or the name of a path."""
    loss: Number | None = None
    tokens: Count | None = None
    grad_norm: Number | None = None
    skipped: Flag = False
    verdict: Text = ""
    """The verdict on the update as a sentence without a full stop at its end: the main wait, figures, and the knob to
    change."""


def moved_by(rows: Iterable[_Row], key: Callable[[_Row], _Key]) -> dict[_Key, tuple[int, float]]:
    """Bytes and busy seconds of rows, summed by the key that `key` gives for each row."""
    found: dict[_Key, tuple[int, float]] = {}
    for row in rows:
        nbytes, seconds = found.get(name := key(row), (0, 0.0))
        found[name] = nbytes + row.bytes, seconds + row.busy_seconds
    return found
