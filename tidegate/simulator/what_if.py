"""What an update would take and use under other knobs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tidegate.plan.effective_knobs import Effective
from tidegate.plan.ops import OpKind, Processor
from tidegate.plan.plan import Plan
from tidegate.simulator.interference import speed
from tidegate.simulator.lower_bound import Bound, bound
from tidegate.simulator.simulate import simulate, update_seconds
from tidegate.simulator.steady_state import Rank, Settled, sampled, settled
from tidegate.speeds.rate_card import RateCard
from tidegate.timeline.stall_analysis import SCHEDULER, exposed_waits


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What an update would take and use. Seconds from the call of `step()` until it returns.

    Where orders alternate, the mean of both steps; of memory, the larger.
    """

    update_seconds: float
    stalls: dict[str, float]
    """Seconds of the update in which nothing computes, by cause."""
    link_bytes: dict[str, int]
    """Bytes of one step by lane (`h2d`, `d2h` with gradients, `<path>:read`, `<path>:write`)."""
    updated_params: dict[Processor, int]
    device_bytes: int
    """Device memory for residents and staging slots."""
    host_bytes: dict[str, int]
    """Host memory by kind: `state` (the host cache, with paths), `mirror`, `gradient`, `slot`."""
    least: Bound
    """What these knobs cannot go below on this machine, and what decides that."""


def what_if(rank: Rank, effective: Effective, rates: RateCard, *, backward_seconds: float | None = None) -> Prediction:
    """The update of `rank` under these knobs, once they have settled.

    backward_seconds: how long the backward takes, in which copies and fetches may run; None for long enough to hide all
    of them that can be hidden. Of many subgroups some stand for all, and seconds are scaled by parameters; bytes and
    parameters are always exact. ConfigError when a rate is not known that these knobs need.
    """
    few, smaller, scale = sampled(rank, effective)
    steps = settled(few, smaller, rates)
    timelines = [
        simulate(plan, rates, step_at=at) for plan, at in _plans(steps, rates, _shortened(backward_seconds, scale))
    ]
    seconds, stalls = rates.step_seconds or 0.0, Counter[str]()
    if rates.step_seconds:
        stalls[SCHEDULER] += rates.step_seconds  # type: ignore[assignment]
    for timeline in timelines:
        update = timeline.phases[-1]
        seconds += (update.end - update.start) * scale / len(timelines)
        for cause, wait in exposed_waits(timeline).items():
            stalls[cause] += wait * scale / len(timelines)  # type: ignore[assignment]
    least = min(bound(step, rates) for step in steps)
    whole = settled(rank, effective, rates)
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
        least=least._replace(seconds=least.seconds * scale),
    )


def predicted_seconds(
    rank: Rank, effective: Effective, rates: RateCard, *, backward_seconds: float | None = None
) -> float:
    """The `update_seconds` of `what_if`, and nothing else: a training thread waits for it."""
    few, smaller, scale = sampled(rank, effective)
    plans = _plans(settled(few, smaller, rates), rates, _shortened(backward_seconds, scale))
    beside = rates.step_seconds or 0.0
    ops = [update_seconds(plan, rates, step_at=at) - beside for plan, at in plans]
    return sum(ops) / len(ops) * scale + beside


def _shortened(backward_seconds: float | None, scale: float) -> float | None:
    """A sample of the subgroups has as small a share of the backward to hide its copies in."""
    return None if backward_seconds is None else backward_seconds / scale


def _plans(steps: list[Settled], rates: RateCard, backward_seconds: float | None) -> list[tuple[Plan, float]]:
    """Each plan, and when its `step()` comes."""
    if backward_seconds is not None:
        return [(step.plan(rates, backward_seconds), backward_seconds) for step in steps]
    ample = [_early_seconds(step.plan(rates), rates) for step in steps]
    return [(step.plan(rates, at), at) for step, at in zip(steps, ample, strict=True)]


def _early_seconds(plan: Plan, rates: RateCard) -> float:
    """A backward that is long enough for all that may run before `step()`."""
    d2h = sum(rates.seconds(op) for op in plan.of_kind(OpKind.GRAD_D2H))
    h2d = sum(rates.seconds(op) for op in list(plan.of_kind(OpKind.STATE_H2D))[: plan.num_slots])
    if not plan.paths:
        return max(d2h, h2d)
    # One after the other and with every lane in the way: more than is needed changes nothing.
    slowest = min(speed(lane, plan.lanes, rates.keeps) for lane in plan.lane_names)
    return (d2h + h2d + sum(rates.seconds(op) for op in plan.of_kind(OpKind.FETCH, OpKind.WEIGHT_D2H))) / slowest
