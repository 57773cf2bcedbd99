"""Simulation of one plan: computes when each op would start and end."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tidegate.plan.ops import Op
from tidegate.plan.plan import Plan
from tidegate.simulator.event_loop import Times, times_together
from tidegate.speeds.rate_card import RateCard
from tidegate.timeline.timeline import PhaseSpan, Span, Timeline


def simulate(
    plan: Plan,
    rates: RateCard,
    *,
    step_at: float,
    gradient_ready: Mapping[int, float] | None = None,
    step: int = 0,
    durations: Callable[[Op], float] | None = None,
) -> Timeline:
    """The simulated timeline of `plan` on a machine with `rates`, in seconds since the backward pass began.

    An op starts as soon as the previous op of its lane has ended, its dependencies have ended and its gate is open.
    step_at: time at which `step()` is called. gradient_ready: time at which the gradient of each subgroup arrives; 0.0
    where absent. durations: gives the run time of each op, instead of the rate card. Lanes slow each other down by the
    interference factors of the rate card. Equal inputs give equal timelines.
    """
    starts, ends = _times(plan, rates, step_at, gradient_ready or {}, durations or rates.seconds)
    return _timeline(plan, step, step_at, starts, ends)


def update_seconds(plan: Plan, rates: RateCard, *, step_at: float) -> float:
    """The simulated time of `step()` in seconds, if it is called `step_at` seconds after the backward pass began."""
    ends = _times(plan, rates, step_at, {}, rates.seconds)[1]
    return _update_end(plan, step_at, ends) - step_at + (rates.step_seconds or 0.0)


def _update_end(plan: Plan, step_at: float, ends: Times) -> float:
    """When `step()` returns: after all ops but the deferred flushes."""
    deferred = plan.deferred_flushes
    return max([step_at, *(end for op, end in ends.items() if op not in deferred)])


def _times(
    plan: Plan,
    rates: RateCard,
    step_at: float,
    gradient_ready: Mapping[int, float],
    seconds: Callable[[Op], float],
) -> tuple[Times, Times]:
    """Start and end times of all ops."""
    opens = {"step": step_at, "none": 0.0}
    return times_together(
        [plan], seconds, lambda op: opens.get(op.gate, gradient_ready.get(op.subgroup, 0.0)), rates.keeps
    )[0]


def _timeline(plan: Plan, step: int, step_at: float, starts: dict[int, float], ends: dict[int, float]) -> Timeline:
    spans = [
        Span(op.id, op.kind, op.lane, op.subgroup, starts[op.id], ends[op.id], op.nbytes, op.numel, op.content, op.slot)
        for op in plan.ops
    ]
    spans.sort(key=lambda span: (span.start, span.op))
    end = _update_end(plan, step_at, ends)
    return Timeline(
        step=step,
        source="simulated",
        spans=tuple(spans),
        phases=(PhaseSpan("backward", 0.0, step_at), PhaseSpan("update", step_at, end)),
        deps={op.id: op.deps for op in plan.ops},
    )
