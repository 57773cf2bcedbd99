"""Record of one finished step: its raw data. Reports and timelines are computed from it on demand."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tidegate.agent.engine.phases import StepPhases
from tidegate.agent.engine.step_result import StepResult
from tidegate.agent.optimizer.gradient_arrival import GradientArrival, gradient_arrival_of
from tidegate.agent.telemetry.paths import PathSample
from tidegate.timeline.timeline import PhaseSpan, Span, Timeline
from tidegate.wire.timeline import MAX_SPANS, TimelineView


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
        """Converts the timeline to a message for the daemon. pydantic validates the whole message from dicts in one
        call, which takes half the time of creating an object for each row."""
        zero = self._zero
        phases = [{"phase": p.phase, "start": p.start - zero, "end": p.end - zero} for p in self.phases.with_tail]
        sent = [s.op for s in self.result.spans[:MAX_SPANS]]
        return TimelineView.model_validate({
            "step": self.number,
            "source": "measured",
            "origin": self._wall + zero,
            "phases": phases,
            "spans": list(self._rows(zero)),
            "num_spans": len(self.result.spans),
            "deps": {op: deps for op in sent if (deps := self.deps.get(op))},
        })  # fmt: skip

    def _rows(self, zero: float) -> Iterator[dict[str, Any]]:
        """Spans as dicts for the message, at most MAX_SPANS. `zero`: monotonic time at which the step began."""
        for s in self.result.spans[:MAX_SPANS]:
            yield {
                "op": s.op, "kind": s.kind, "lane": s.lane, "subgroup": s.subgroup, "start": s.start - zero,
                "end": s.end - zero, "nbytes": s.nbytes, "numel": s.numel, "slot": s.slot,
            }  # fmt: skip

    @property
    def _zero(self) -> float:
        """Monotonic time at which the step began."""
        starts = [span.start for span in self.result.spans] + [phase.start for phase in self.phases.spans]
        return min(starts, default=-self._wall)
