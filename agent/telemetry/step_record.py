"""Record of one finished step: its raw data. Reports and timelines are computed from it on demand."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import cached_property

from tidegate.agent.engine.phases import StepPhases
from tidegate.agent.engine.step_result import StepResult
from tidegate.agent.optimizer.gradient_arrival import GradientArrival, gradient_arrival_of
from tidegate.agent.telemetry.paths import PathSample
from tidegate.timeline.timeline import PhaseSpan, Span, Timeline
from tidegate.wire.timeline import TimelineView
from tidegate.wire.translation import as_view


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
    def gradient_arrival(self) -> GradientArrival:
        """Statistics of how this step's gradients became available, for example the bytes that were copied to the host
        twice, and the time in the backward before the first gradient."""
        return gradient_arrival_of(self.result, self.phases)

    @cached_property
    def timeline(self) -> Timeline:
        """The measured timeline with times relative to the start of the step."""
        zero = self._zero
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

    def view(self) -> TimelineView:
        """The timeline as a message for the daemon, with times relative to the start of the step."""
        return as_view(replace(self.monotonic_timeline, phases=self.phases.with_tail), self._zero)

    @property
    def _zero(self) -> float:
        """Monotonic time at which the step began."""
        starts = [span.start for span in self.result.spans] + [phase.start for phase in self.phases.spans]
        return min(starts, default=-self._wall)
