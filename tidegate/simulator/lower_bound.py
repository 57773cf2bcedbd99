"""The lower bound of an update: what its busiest resource needs, without a pause."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from tidegate.plan.ops import Content, Op, OpKind, Subgroup, path_lanes
from tidegate.plan.tasks import Work
from tidegate.simulator.interference import Keeps
from tidegate.simulator.steady_state import Settled, ops_of
from tidegate.speeds.rate_card import RateCard

_MAY_BE_EARLY: Final = (OpKind.FETCH, OpKind.WEIGHT_D2H, OpKind.GRAD_D2H)


class Bound(NamedTuple):
    """By these rates no update under these knobs takes less than `seconds`; `resource` (a lane, or a path) decides
    that. How late ops typically begin is in the rates: a lucky update may be faster."""

    seconds: float
    resource: str


def bound(step: Settled, rates: RateCard) -> Bound:
    """The norm, and then the busiest resource. What may be done before `step()` is left out.

    ConfigError when a rate is not known.
    """
    lanes: defaultdict[str, float] = defaultdict(float)
    some, counts = _kinds(step)
    work = some.work()
    for op in _late(work):
        lanes[op.lane] += counts[op.subgroup] * rates.seconds(op)
    slots = step.rank.num_slots
    staged = sorted(
        (rates.seconds(op) for op in ops_of(work) if _takes_slot(op) for _ in range(min(slots, counts[op.subgroup]))),
        reverse=True,
    )
    if staged:
        lanes["h2d"] = max(0.0, lanes["h2d"] - sum(staged[:slots]))
    resources = dict(lanes)
    for path in step.rank.host_slots:
        read, write = path_lanes(path)
        resources[path] = both_seconds(resources.pop(read, 0.0), resources.pop(write, 0.0), read, write, rates.keeps)
    resource = max(resources, key=lambda name: resources[name], default="device")
    norm = replace(work.norm, numel=sum(s.numel for s in step.rank.subgroups) if work.norm.numel else 0)
    return Bound(rates.seconds(norm) + resources.get(resource, 0.0), resource)


def _kinds(step: Settled) -> tuple[Settled, Sequence[int]]:
    """A step with one subgroup of each kind, and how many each stands for. With paths each stands for itself: what
    waits for a host slot follows from their order."""
    if step.rank.host_slots:
        return step, [1] * len(step.placements)
    sizes = [(s.numel, s.weight_bytes, s.grad_bytes, s.state_bytes) for s in step.rank.subgroups]
    counts = Counter(zip(sizes, step.placements, strict=True))
    rank = replace(step.rank, subgroups=[Subgroup(i, *size) for i, (size, _) in enumerate(counts)])
    return Settled(rank, tuple(placement for _, placement in counts), step.order), [*counts.values()]


def both_seconds(one: float, other: float, lane: str, beside: str, keeps: Keeps) -> float:
    """The least time for work of two lanes, in seconds that each would take alone, when they slow each other down."""
    first, second = _share(keeps, lane, beside), _share(keeps, beside, lane)
    if first + second <= 1:
        return one + other
    if one / first > other / second:
        one, other, first, second = other, one, second, first
    # Both until the shorter one is done, then the rest of the longer one alone.
    return one / first + max(0.0, other - second * one / first)


def _share(keeps: Keeps, lane: str, beside: str) -> float:
    return keeps.get(lane, {}).get(beside, 1.0)


def _late(work: Work) -> list[Op]:
    """What cannot be done before the norm is known: updates, what follows them, and what waits for a host slot.

    Of a slot an update on the device needs the room for state alone; that for weights and gradients stays free.
    """
    taken: set[tuple[int, Content]] = set()
    late: list[Op] = []
    for task in work.tasks:
        late += [op for op in task.ops if op.kind not in _MAY_BE_EARLY or not taken.isdisjoint(_rooms(op))]
        taken.update(room for op in task.ops for room in _rooms(op))
    return late


def _rooms(op: Op) -> list[tuple[int, Content]]:
    """What of a host slot the op works on."""
    if op.host_slot is None:
        return []
    return [(op.host_slot, content) for content in ([op.content] if op.content else ("state", "weight", "gradient"))]


def _takes_slot(op: Op) -> bool:
    return op.kind is OpKind.STATE_H2D and op.slot is not None
