"""The result and the phases of one step, as observers of the optimizer get them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

from tidegate.plan import Plan
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.timeline.timeline import Phase, PhaseSpan, Span


@dataclass(frozen=True)
class StepResult:
    """Result of one step. Span times are in seconds on the monotonic clock."""

    plan: Plan
    spans: tuple[Span, ...]
    skipped: bool
    grad_norm: float | None
    effective: EffectiveKnobs
    stepped: tuple[int, ...]
    """Numbers of the parameters that were updated."""
    num_dropped: int = 0
    """Number of spans at the start of `spans` that belong to plans which were dropped before `step()`. The op ids of
    these spans are ids of the dropped plans, not of `plan`."""
    bad_params: tuple[int, ...] = ()
    """If the step was skipped: parameters whose gradients are not finite on this rank."""
    scaled: bool = False
    """Whether a GradScaler has found gradients that are not finite, so that the step was skipped."""

    @property
    def waited_spans(self) -> tuple[Span, ...]:
        """The spans without those of deferred flushes, for which `step()` does not wait."""
        deferred, dropped = self.plan.deferred_flushes, self.num_dropped
        if not deferred:
            return self.spans
        return (*self.spans[:dropped], *(span for span in self.spans[dropped:] if span.op not in deferred))

    @cached_property
    def update_end(self) -> float:
        """The end of the update, without its deferred flushes, in seconds on the monotonic clock; 0 without spans."""
        return max([span.end for span in self.waited_spans], default=0.0)


@dataclass(frozen=True)
class StepPhases:
    """The phases of one step with their figures. Times are in seconds on the monotonic clock."""

    spans: tuple[PhaseSpan, ...]
    cpu_seconds: dict[Phase, float]
    device_peak_bytes: dict[Phase, int]
    exposed_seconds: dict[Phase, float]
    clock_cpu_seconds: float = 0.0
    """Overhead of the recording: CPU seconds of the training thread at the boundaries of phases."""
    tail: tuple[PhaseSpan, ...] = ()
    """Phases of the next step during which this step's update was still running. They count for the next step; here
    they only show in which phase bytes were moved."""

    logged: dict[str, float] = field(default_factory=dict)
    """Figures that the training loop gave for the step with `AdamW.log`."""
    first_gradient: float | None = None
    """When the first gradient of the step's last backward pass arrived, on the host's monotonic clock."""
    single_node_share: float = 0.0
    """Largest share of the parameters' elements whose gradients come from a single node of the autograd graph, and so
    arrive together, in the step's last backward pass."""
    waits_for_update: tuple[PhaseSpan, ...] = ()
    """Times in which the training thread waited for the update of the step before, each with the phase of this step in
    which it waited. They are a part of `exposed_seconds`."""

    @property
    def with_tail(self) -> tuple[PhaseSpan, ...]:
        """All phases in which this step's update may have moved bytes."""
        return self.spans + self.tail

    def seconds(self) -> dict[Phase, float]:
        """Wall time of each phase in this step."""
        total: dict[Phase, float] = defaultdict(float)
        for span in self.spans:
            total[span.phase] += span.end - span.start
        return dict(total)
