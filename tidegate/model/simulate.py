"""Runs a plan in virtual time, and answers what an update would cost under other knobs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tidegate.analysis import exposed_waits
from tidegate.errors import ConfigError, PlanError
from tidegate.knobs import OFF, Off, device_share, spec
from tidegate.model.equations import cpu_to_device_ratio, stride_from_ratio
from tidegate.model.rates import RateCard
from tidegate.plan.ops import D2H, GATE_OF, H2D, Content, Op, OpKind, Processor, Subgroup
from tidegate.plan.placement import place, steady
from tidegate.plan.plan import Placement, Plan
from tidegate.plan.planner import make_plan
from tidegate.timeline import PhaseSpan, Span, Timeline

CANDIDATE_STRIDES: Final[tuple[float, ...]] = (1, 1.25, 1.5, 2, 2.5, 3, 4, 6, 8, 12, 16)
MAX_SIMULATED_SUBGROUPS: Final = 400
_ROUNDING: Final = 1 + 1e-8
"""Sums of the same durations in another order differ by less."""


_Times = dict[int, float]
"""Seconds by op id."""


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
    rate card. Equal inputs give equal timelines.
    """
    starts, ends = _times(plan, durations or rates.seconds, step_at, gradient_ready or {})
    return _timeline(plan, step, step_at, starts, ends)


def update_seconds(plan: Plan, rates: RateCard, *, step_at: float) -> float:
    """From the call of `step()`, `step_at` seconds after the backward pass began, until everything is done."""
    return max(step_at, *_times(plan, rates.seconds, step_at, {})[1].values()) - step_at


def _times(
    plan: Plan, seconds: Callable[[Op], float], step_at: float, gradient_ready: Mapping[int, float]
) -> tuple[_Times, _Times]:
    """When each op starts and ends.

    That follows from the ends of what it waits for, so that plans need no events: one pass over the ops does it when
    they stand in an order in which they could run one at a time, as those of the planner do. What waits for a later
    one is left for the next pass.
    """
    starts: _Times = {}
    ends: _Times = {}
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
    sample, scale = _sample(subgroups)
    plan, step_at = _settled(sample, stride, static_ratio, num_slots, rates)
    timeline = simulate(plan, rates, step_at=step_at)
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
    best = stride_below(math.inf, subgroups, static_ratio, num_slots, rates)
    assert best is not None, "every update ends"
    return best


def better_stride(
    stride: float | Off,
    subgroups: Sequence[Subgroup],
    static_ratio: float,
    num_slots: int,
    rates: RateCard,
    *,
    minimum_gain: float,
) -> float | Off | None:
    """`best_stride` if it takes more than `minimum_gain` off the predicted update of `stride`, else None."""
    sample, scale = _sample(subgroups)
    plan, step_at = _settled(sample, stride, static_ratio, num_slots, rates)
    seconds = update_seconds(plan, rates, step_at=step_at) * scale
    return stride_below((1 - minimum_gain) * seconds, subgroups, static_ratio, num_slots, rates)


def stride_below(
    limit_seconds: float, subgroups: Sequence[Subgroup], static_ratio: float, num_slots: int, rates: RateCard
) -> float | Off | None:
    """`best_stride` if its update is predicted to take less than `limit_seconds`, else None.

    The most promising candidates are simulated first, and those that cannot be better than the best so far not at all:
    a training thread waits for this.
    """
    sample, scale = _sample(subgroups)
    strides: list[float | Off] = [OFF]
    if num_slots > 0:
        strides += sorted({*CANDIDATE_STRIDES, *_equation_stride(subgroups, rates)}, reverse=True)
    floors = [(_floor_seconds(sample, stride, static_ratio, num_slots, rates) * scale, stride) for stride in strides]
    best: tuple[float, float, float | Off] | None = None
    for floor, stride in sorted(floors, key=lambda pair: pair[0]):
        if floor > _ROUNDING * min(limit_seconds, best[0] if best else math.inf):
            break
        plan, step_at = _settled(sample, stride, static_ratio, num_slots, rates)
        seconds = update_seconds(plan, rates, step_at=step_at) * scale
        # Nine digits: sums of the same durations in another order are the same time.
        found = (float(f"{seconds:.9g}"), device_share(stride), stride)
        if seconds < limit_seconds and (best is None or found[:2] < best[:2]):
            best = found
    return best[2] if best else None


def _floor_seconds(
    sample: Sequence[Subgroup], stride: float | Off, static_ratio: float, num_slots: int, rates: RateCard
) -> float:
    """What no settled update takes less than: its norm, and then its busiest lane without a pause."""
    both = list(zip(sample, _placed(sample, stride, static_ratio), strict=True))
    on_cpu = [s for s, p in both if p.processor == "cpu"]
    staged = [s for s, p in both if p.processor == "device" and p.after == "host"]
    amounts = {
        OpKind.CPU_UPDATE: _numel(on_cpu),
        OpKind.DEVICE_UPDATE: _numel(sample) - _numel(on_cpu),
        # The first fetch into each slot may be done before.
        OpKind.STATE_H2D: _nbytes(on_cpu, "weight") + _nbytes(staged[num_slots:], "state"),
        OpKind.STATE_D2H: _nbytes(staged, "state"),
    }
    lanes = [rates.seconds(Op(-1, kind, -1, amount, amount)) for kind, amount in amounts.items() if amount]
    return rates.seconds(Op(-1, OpKind.NORM, -1, 0, _numel(sample))) + max(lanes)


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


def _sample(subgroups: Sequence[Subgroup]) -> tuple[list[Subgroup], float]:
    """At most MAX_SIMULATED_SUBGROUPS of them, and how many parameters each of theirs stands for."""
    count = min(len(subgroups), MAX_SIMULATED_SUBGROUPS)
    if count == 0:
        raise ConfigError("There are no subgroups to predict an update for.")
    sample = [replace(subgroups[i * len(subgroups) // count], id=i) for i in range(count)]
    return sample, _numel(subgroups) / _numel(sample) if count < len(subgroups) else 1.0


def _settled(
    sample: Sequence[Subgroup], stride: float | Off, static_ratio: float, num_slots: int, rates: RateCard
) -> tuple[Plan, float]:
    """The plan of these knobs, and when `step()` comes at the earliest if early copies are to be hidden."""
    plan = make_plan(sample, _placed(sample, stride, static_ratio), num_slots=num_slots, rates=rates)
    return plan, _early_seconds(plan, rates)


def _placed(subgroups: Sequence[Subgroup], stride: float | Off, static_ratio: float) -> tuple[Placement, ...]:
    return steady(place(len(subgroups), stride=stride, static_ratio=static_ratio))


def _early_seconds(plan: Plan, rates: RateCard) -> float:
    """When the copies that may run before `step()` are done: all gradients, and the first fetch into each slot."""
    d2h = sum(rates.seconds(op) for op in plan.of_kind(OpKind.GRAD_D2H))
    h2d = sum(rates.seconds(op) for op in list(plan.of_kind(OpKind.STATE_H2D))[: plan.num_slots])
    return max(d2h, h2d)


def _numel(subgroups: Iterable[Subgroup]) -> int:
    return sum(s.numel for s in subgroups)


def _nbytes(subgroups: Iterable[Subgroup], content: Content) -> int:
    return sum(s.nbytes(content) for s in subgroups)


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
