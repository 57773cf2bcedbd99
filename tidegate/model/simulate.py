"""Runs a plan in virtual time, and answers what an update would cost under other knobs."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

from tidegate.analysis import exposed_waits
from tidegate.errors import ConfigError, PlanError
from tidegate.knobs import OFF, Off, device_share, spec
from tidegate.model.equations import cpu_to_device_ratio, stride_from_ratio
from tidegate.model.rates import RateCard
from tidegate.plan.ops import D2H, H2D, Gate, Op, OpKind, Processor, Subgroup
from tidegate.plan.placement import place, steady
from tidegate.plan.plan import Placement, Plan
from tidegate.plan.planner import make_plan
from tidegate.timeline import PhaseSpan, Span, Timeline

CANDIDATE_STRIDES: Final[tuple[float, ...]] = (1, 1.25, 1.5, 2, 2.5, 3, 4, 6, 8, 12, 16)
MAX_SIMULATED_SUBGROUPS: Final = 400


class _Event(IntEnum):
    """Priority of what happens at the same time: a gate opens before an op ends."""

    GATE = 0
    END = 1


def simulate(
    plan: Plan,
    rates: RateCard,
    *,
    step_at: float,
    gradient_ready: Mapping[int, float] | None = None,
    step: int = 0,
    durations: Callable[[Op], float] | None = None,
) -> Timeline:
    """What `plan` does on a machine with `rates`, in seconds since the backward pass began.

    An op starts as soon as its lane's last op, its dependencies and its gate let it. `gradient_ready` tells for each
    subgroup when its gradient is there (0.0 when absent), `step_at` when `step()` is called. `durations` replaces the
    rate card. Events are handled by (time, priority, id): equal inputs give equal timelines.
    """
    seconds = durations or rates.seconds
    gates: dict[Gate, Mapping[int, float]] = {"gradient": gradient_ready or {}, "step": {-1: step_at}, "none": {}}
    events = [(gates[op.gate].get(op.subgroup, 0.0), _Event.GATE, op.id) for op in plan.ops]
    heapq.heapify(events)
    blockers, waiters = _waits(plan)
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    while events:
        now, event, op_id = heapq.heappop(events)
        if event is _Event.END:
            ends[op_id] = now
        for waiter in [op_id] if event is _Event.GATE else waiters[op_id]:
            blockers[waiter] -= 1
            if blockers[waiter] == 0:
                starts[waiter] = now
                heapq.heappush(events, (now + seconds(plan.by_id[waiter]), _Event.END, waiter))
    if len(ends) < len(plan.ops):
        stuck = next(op for op in plan.ops if op.id not in ends)
        raise PlanError(
            f"Nothing can run and op {stuck.id} ({stuck.name}) still waits: the plan deadlocks.", "deadlock"
        )
    return _timeline(plan, step, step_at, starts, ends)


def _waits(plan: Plan) -> tuple[dict[int, int], dict[int, list[int]]]:
    """For each op, how many things it waits for (ops, and its gate: `none` opens at 0), and which ops wait for it."""
    blockers = {op.id: len(op.deps) + 1 for op in plan.ops}
    waiters: dict[int, list[int]] = {op.id: [] for op in plan.ops}
    for op in plan.ops:
        for dep in op.deps:
            waiters[dep].append(op.id)
    for lane in plan.lanes.values():
        for first, second in itertools.pairwise(lane):
            waiters[first.id].append(second.id)
            blockers[second.id] += 1
    return blockers, waiters


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


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What an update would take and use. Seconds from the call of `step()` until everything is done."""

    update_seconds: float
    stalls: dict[str, float]
    """Seconds of the update in which nothing computes, by cause."""
    link_bytes: dict[str, int]
    """Bytes of one step by lane (`h2d`, `d2h`), gradients included."""
    updated_params: dict[Processor, int]
    device_bytes: int
    """Device memory for residents and staging slots."""


def what_if(
    subgroups: Sequence[Subgroup],
    *,
    stride: float | Off,
    static_ratio: float,
    num_slots: int,
    rates: RateCard,
) -> Prediction:
    """The update under these knobs, once they have settled and after a backward long enough to hide early copies.

    Over MAX_SIMULATED_SUBGROUPS, evenly spaced ones stand for the others and seconds are scaled by parameters; bytes
    and parameters are always exact.
    """
    sample = _sample(subgroups)
    plan = make_plan(sample, _placed(sample, stride, static_ratio), num_slots=num_slots, rates=rates)
    step_at = _early_seconds(plan, rates)
    timeline = simulate(plan, rates, step_at=step_at)
    scale = _numel(subgroups) / _numel(sample) if len(sample) < len(subgroups) else 1.0
    placements = _placed(subgroups, stride, static_ratio)
    return Prediction(
        update_seconds=(timeline.phases[-1].end - step_at) * scale,
        stalls={cause: seconds * scale for cause, seconds in exposed_waits(timeline).items()},
        link_bytes=_link_bytes(subgroups, placements),
        updated_params={
            "cpu": _numel(s for s, p in zip(subgroups, placements, strict=True) if p.processor == "cpu"),
            "device": _numel(s for s, p in zip(subgroups, placements, strict=True) if p.processor == "device"),
        },
        device_bytes=_device_bytes(subgroups, placements, num_slots),
    )


def best_stride(subgroups: Sequence[Subgroup], static_ratio: float, num_slots: int, rates: RateCard) -> float | Off:
    """The stride with the shortest predicted update; of equal ones, that which asks least of the device.

    Candidates are a fixed list and the stride of DOS Eq. 1. `off` when there is no slot to stage through.
    """
    strides: list[float | Off] = [OFF]
    if num_slots > 0:
        strides += sorted({*CANDIDATE_STRIDES, *_equation_stride(subgroups, rates)}, reverse=True)

    def cost(stride: float | Off) -> tuple[float, float]:
        found = what_if(subgroups, stride=stride, static_ratio=static_ratio, num_slots=num_slots, rates=rates)
        # Nine digits: sums of the same durations in another order are the same time.
        return float(f"{found.update_seconds:.9g}"), device_share(stride)

    return min(strides, key=cost)


def _equation_stride(subgroups: Sequence[Subgroup], rates: RateCard) -> tuple[float, ...]:
    """The stride of DOS Eq. 1, with B counted in thirds of our state, which need not be three fp32 words."""
    h2d, d2h = rates.h2d_bytes_per_second, rates.d2h_bytes_per_second
    on_cpu, on_device = rates.cpu_params_per_second, rates.device_params_per_second
    state_bytes = sum(s.nbytes("state") for s in subgroups)
    if h2d is None or d2h is None or on_cpu is None or on_device is None or not state_bytes:
        return ()
    word_bytes = state_bytes / _numel(subgroups) / 3
    stride = stride_from_ratio(cpu_to_device_ratio(min(h2d, d2h) / word_bytes, on_cpu, on_device))
    return (stride,) if stride <= spec("stride").maximum else ()


def _sample(subgroups: Sequence[Subgroup]) -> list[Subgroup]:
    count = min(len(subgroups), MAX_SIMULATED_SUBGROUPS)
    if count == 0:
        raise ConfigError("There are no subgroups to predict an update for.")
    return [replace(subgroups[i * len(subgroups) // count], id=i) for i in range(count)]


def _placed(subgroups: Sequence[Subgroup], stride: float | Off, static_ratio: float) -> tuple[Placement, ...]:
    return steady(place(len(subgroups), stride=stride, static_ratio=static_ratio))


def _early_seconds(plan: Plan, rates: RateCard) -> float:
    """When the copies that may run before `step()` are done: all gradients, and the first fetch into each slot."""
    d2h = sum(rates.seconds(op) for op in plan.of_kind(OpKind.GRAD_D2H))
    h2d = sum(rates.seconds(op) for op in list(plan.of_kind(OpKind.STATE_H2D))[: plan.num_slots])
    return max(d2h, h2d)


def _numel(subgroups: Iterable[Subgroup]) -> int:
    return sum(s.numel for s in subgroups)


def _link_bytes(subgroups: Sequence[Subgroup], placements: Sequence[Placement]) -> dict[str, int]:
    both = list(zip(subgroups, placements, strict=True))
    staged = sum(s.nbytes("state") for s, p in both if p.processor == "device" and p.after == "host")
    return {
        H2D: staged + sum(s.nbytes("weight") for s, p in both if p.processor == "cpu"),
        D2H: staged + sum(s.nbytes("gradient") for s, p in both if p.processor == "cpu"),
    }


def _device_bytes(subgroups: Sequence[Subgroup], placements: Sequence[Placement], num_slots: int) -> int:
    """A slot holds the largest subgroup; with nothing to stage there are no slots."""
    residents = sum(s.nbytes("state") for s, p in zip(subgroups, placements, strict=True) if p.after == "device")
    if all(p.processor == "cpu" or p.after == "device" for p in placements):
        return residents
    return residents + num_slots * max(s.nbytes("state") for s in subgroups)
