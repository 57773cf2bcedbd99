"""What-if prediction: the time, stalls, bytes and memory of an update under other knobs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.plan.interference import relative_speed
from tidegate.plan.ops import OpKind, Processor
from tidegate.plan.plan import Plan
from tidegate.simulator.lower_bound import LowerBound, lower_bound
from tidegate.simulator.simulate import simulate, update_seconds
from tidegate.simulator.steady_state import Rank, SteadyStep, sampled, steady_steps
from tidegate.speeds.rate_card import RateCard
from tidegate.timeline.stall_analysis import exposed_waits
from tidegate.timeline.timeline import DISPATCH


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted time and resource use of an update. Seconds are from the call of `step()` until it returns.

    If the order of updates alternates, two different steps take turns. Then times and bytes are the mean of the two
    steps, and memory is that of the step that needs more.
    """

    update_seconds: float
    stalls: dict[str, float]
    """Seconds of the update in which nothing computes, by cause."""
    link_bytes: dict[str, int]
    """Bytes of one step by lane (`h2d`, `d2h` with gradients, `<path>:read`, `<path>:write`)."""
    updated_params: dict[Processor, int]
    device_bytes: int
    """Device memory in bytes for residents and staging slots."""
    host_bytes: dict[str, int]
    """Host memory in bytes, by kind: `state` (with paths, the host cache), `mirror` (copies of weights, for updates on
    the CPU), `gradient`, and `slot` (buffers for state on its way from or to a path, and for weights in an update)."""
    lower_bound: LowerBound
    """Lower bound of the update's time under these knobs, and the resource that sets it."""


def what_if(
    rank: Rank, effective: EffectiveKnobs, rates: RateCard, *, backward_seconds: float | None = None
) -> Prediction:
    """Predicts the update of `rank` under these knobs, in the steady state.

    backward_seconds: length of the backward, during which copies and fetches may run; None for a backward that is long
    enough to overlap all ops that may run before `step()`. If there are many subgroups, a sample is simulated, and
    seconds are scaled by parameters; bytes and parameters are always exact. ConfigError when a rate is not known that
    these knobs need.
    """
    few, smaller, scale = sampled(rank, effective)
    steps = steady_steps(few, smaller, rates)
    timelines = [
        simulate(plan, rates, step_at=at) for plan, at in _plans(steps, rates, _shortened(backward_seconds, scale))
    ]
    seconds, stalls = rates.step_seconds or 0.0, Counter[str]()
    if rates.step_seconds:
        stalls[DISPATCH] += rates.step_seconds  # type: ignore[assignment]
    for timeline in timelines:
        update = timeline.phases[-1]
        seconds += (update.end - update.start) * scale / len(timelines)
        for cause, wait in exposed_waits(timeline).items():
            stalls[cause] += wait * scale / len(timelines)  # type: ignore[assignment]
    shortest = min(lower_bound(step, rates) for step in steps)
    whole = steady_steps(rank, effective, rates)
    moved = [step.lane_bytes() for step in whole]
    on_device = sum(
        s.numel for s, p in zip(rank.subgroups, whole[0].placements, strict=True) if p.processor == "device"
    )
    return Prediction(
        update_seconds=seconds,
        stalls=dict(stalls),
        link_bytes={lane: sum(bytes_of[lane] for bytes_of in moved) // len(moved) for lane in moved[0]},
        updated_params={"cpu": sum(s.numel for s in rank.subgroups) - on_device, "device": on_device},
        device_bytes=max(step.device_bytes() for step in whole),
        host_bytes=max((step.host_bytes() for step in whole), key=lambda kinds: sum(kinds.values())),
        lower_bound=shortest._replace(seconds=shortest.seconds * scale),
    )


def predicted_seconds(
    rank: Rank, effective: EffectiveKnobs, rates: RateCard, *, backward_seconds: float | None = None
) -> float:
    """Predicts the update's time in seconds: equal to `update_seconds` of `what_if`, but computed faster, because a
    training thread waits for the result."""
    few, smaller, scale = sampled(rank, effective)
    plans = _plans(steady_steps(few, smaller, rates), rates, _shortened(backward_seconds, scale))
    fixed = rates.step_seconds or 0.0
    ops = [update_seconds(plan, rates, step_at=at) - fixed for plan, at in plans]
    return sum(ops) / len(ops) * scale + fixed


def _shortened(backward_seconds: float | None, scale: float) -> float | None:
    """The length of the backward for a sample of the subgroups, in seconds: `backward_seconds` divided by the scale
    factor of the sample, so that the same share of copies overlaps the backward. None stays None."""
    return None if backward_seconds is None else backward_seconds / scale


def _plans(steps: list[SteadyStep], rates: RateCard, backward_seconds: float | None) -> list[tuple[Plan, float]]:
    """The plan of each step, and the time of its `step()` in seconds after the start of the backward."""
    if backward_seconds is not None:
        return [(step.plan(rates, backward_seconds), backward_seconds) for step in steps]
    ample = [_early_seconds(step.plan(rates), rates) for step in steps]
    return [(step.plan(rates, at), at) for step, at in zip(steps, ample, strict=True)]


def _early_seconds(plan: Plan, rates: RateCard) -> float:
    """A length of the backward in seconds in which all ops that may run before `step()` have time to end."""
    d2h = sum(rates.seconds(op) for op in plan.of_kind(OpKind.GRAD_D2H))
    h2d = sum(rates.seconds(op) for op in list(plan.of_kind(OpKind.STATE_H2D))[: plan.num_slots])
    if not plan.paths:
        return max(d2h, h2d)
    # Serial, with interference by all lanes: an overestimate, which does not change the result.
    slowest = min(relative_speed(lane, plan.lanes, rates.keeps) for lane in plan.lane_names)
    return (d2h + h2d + sum(rates.seconds(op) for op in plan.of_kind(OpKind.FETCH, OpKind.WEIGHT_D2H))) / slowest
