"""The result of one step, as observers of the optimizer get it."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.plan import Plan
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.timeline.timeline import Span


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
