"""Record of one finished step: its raw data. Reports and timelines are computed from it on demand."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from tidegate.timeline.bytes_by_phase import Moved
from tidegate.timeline.step_result import StepPhases, StepResult
from tidegate.timeline.timeline import PhaseSpan, Span, Timeline


class PathTransfer(Moved, Protocol):
    """A read or write of a storage path."""

    @property
    def is_whole(self) -> bool:
        """False for the transfer of a part of a file."""


@dataclass(frozen=True, slots=True)
class PathSample:
    """Sample of one path at the end of a step: its transfers since the last sample (`moves`), and the fields of the
    message `PathState`, which is made of it later."""

    path: str
    moves: tuple[tuple[str, PathTransfer], ...]
    free_bytes: int | None
    bytes: Mapping[str, int]
    lock_wait_seconds: Mapping[str, float]
    errors: Mapping[str, int]
    ceiling_bytes_per_second: Mapping[str, float]
    written_bytes_per_day: float | None
    retired: bool = False
    capacity_subgroups: int | None = None


@dataclass(frozen=True, kw_only=True)
class FinishedStep:
    """Raw data of a finished step. Times of `result` and `phases` are on the monotonic clock. `deps`: ids of the ops
    that each op of the plan depends on."""

    number: int
    result: StepResult
    phases: StepPhases
    deps: dict[int, tuple[int, ...]]
    host_bytes: dict[str, int]
    subgroups: dict[str, int]
    """Number of subgroups by residence (`device`, `host` or the name of a path)."""
    paths: tuple[PathSample, ...] = ()
    previous_result: StepResult | None = None
    """Result of the step before; None if it is not known, or if `phases.waits_for_update` is empty."""
    timestamp: float = field(default_factory=time.time)
    _wall: float = field(default_factory=lambda: time.time() - time.monotonic())
    """Difference between the clocks: a time on the monotonic clock plus this value is a time in seconds since the
    epoch."""

    @property
    def monotonic_timeline(self) -> Timeline:
        """The measured timeline with times on the monotonic clock. It is cheaper than `timeline`, because spans are not
        copied, and sufficient where only differences of times are needed."""
        return Timeline(self.number, "measured", self.result.spans, self.phases.spans, self.deps, self._wall)

    @cached_property
    def timeline(self) -> Timeline:
        """The measured timeline with times relative to the start of the step."""
        zero = self.zero
        return Timeline(
            step=self.number,
            source="measured",
            spans=tuple(
                Span(
                    s.op, s.kind, s.lane, s.subgroup, s.start - zero, s.end - zero, s.nbytes, s.numel, s.content, s.slot
                )
                for s in self.result.spans
            ),
            phases=tuple(PhaseSpan(p.phase, p.start - zero, p.end - zero) for p in self.phases.with_tail),
            deps=self.deps,
            origin=self._wall + zero,
        )

    @property
    def zero(self) -> float:
        """Monotonic time at which the step began."""
        starts = [span.start for span in self.result.spans] + [phase.start for phase in self.phases.spans]
        return min(starts, default=-self._wall)
