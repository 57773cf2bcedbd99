"""Simulation of one plan: computes when each op would start and end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tidegate.errors import PlanError
from tidegate.plan.ops import GATE_OF, Op
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
    return max(step_at, *ends.values()) - step_at + (rates.step_seconds or 0.0)


def _times(
    plan: Plan,
    rates: RateCard,
    step_at: float,
    gradient_ready: Mapping[int, float],
    seconds: Callable[[Op], float],
) -> tuple[Times, Times]:
    """Start and end times of all ops."""
    if not rates.keeps:
        return _times_without_interference(plan, seconds, step_at, gradient_ready)
    opens = {"step": step_at, "none": 0.0}
    return times_together(
        [plan], seconds, lambda op: opens.get(op.gate, gradient_ready.get(op.subgroup, 0.0)), rates.keeps
    )[0]


def _times_without_interference(
    plan: Plan, seconds: Callable[[Op], float], step_at: float, gradient_ready: Mapping[int, float]
) -> tuple[Times, Times]:
    """Start and end times of all ops if lanes do not slow each other down.

    Without interference, an op starts when the last of the ops for which it waits has ended, so no event loop is
    needed. In plans of the planner each op comes after the ops for which it waits, and one pass over the list is
    enough. In other lists, an op that waits for a later op is computed in the next pass. PlanError when the plan
    deadlocks.
    """
    starts: Times = {}
    ends: Times = {}
    lane_ends: dict[str, float] = {}
    left: Sequence[Op] = plan.ops
    while left:
        blocked: dict[str, list[Op]] = {}
        for op in left:
            lane, gate = op.lane, GATE_OF.get(op.kind)
            if lane in blocked or any(dep not in ends for dep in op.deps):
                blocked.setdefault(lane, []).append(op)
                continue
            start = 0.0 if gate is None else step_at if gate == "step" else gradient_ready.get(op.subgroup, 0.0)
            start = max([start, lane_ends.get(lane, start), *[ends[dep] for dep in op.deps]])
            starts[op.id] = start
            ends[op.id] = lane_ends[lane] = start + seconds(op)
        waiting = [op for ops in blocked.values() for op in ops]
        if len(waiting) == len(left):
            raise PlanError(
                f"Nothing can run and op {waiting[0].id} ({waiting[0].name}) still waits: the plan deadlocks.",
                "deadlock",
            )
        left = waiting
    return starts, ends


def _timeline(plan: Plan, step: int, step_at: float, starts: dict[int, float], ends: dict[int, float]) -> Timeline:
    spans = [
        Span(op.id, op.kind, op.lane, op.subgroup, starts[op.id], ends[op.id], op.nbytes, op.numel, op.content, op.slot)
        for op in plan.ops
    ]
    spans.sort(key=lambda span: (span.start, span.op))
    end = max(step_at, *ends.values())
    return Timeline(
        step=step,
        source="simulated",
        spans=tuple(spans),
        phases=(PhaseSpan("backward", 0.0, step_at), PhaseSpan("update", step_at, end)),
        deps={op.id: op.deps for op in plan.ops},
    )
