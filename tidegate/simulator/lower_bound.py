"""The lower bound of an update's time: the work of its busiest resource, without pauses."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from tidegate.plan.interference import both_seconds, pair_factors
from tidegate.plan.ops import Content, Op, OpKind, Subgroup, path_lanes
from tidegate.plan.tasks import Work
from tidegate.simulator.steady_state import SteadyStep, ops_of
from tidegate.speeds.rate_card import RateCard

_MAY_BE_EARLY: Final = (OpKind.FETCH, OpKind.WEIGHT_D2H, OpKind.GRAD_D2H)
"""Kinds of op that can run before `step()` is called."""


class LowerBound(NamedTuple):
    """A lower bound of the update's time in seconds, and the resource (a lane or a path) that sets it.

    The rates include the typical delay until a lane's thread starts an op, so that single updates, with shorter delays,
    can be faster than this bound.
    """

    seconds: float
    resource: str


def lower_bound(step: SteadyStep, rates: RateCard) -> LowerBound:
    """The lower bound of the update's time in this step: the time of the gradient norm, plus the work of the busiest
    lane or path. Ops that can run before `step()` are not counted.

    ConfigError when a rate is not known.
    """
    lanes: defaultdict[str, float] = defaultdict(float)
    some, counts = _kinds(step)
    work = some.work()
    for op in _after_norm(work):
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
        resources[path] = both_seconds(
            resources.pop(read, 0.0), resources.pop(write, 0.0), pair_factors(rates.keeps, read, write)
        )
    resource = max(resources, key=lambda name: resources[name], default="device")
    norm = replace(work.norm, numel=sum(s.numel for s in step.rank.subgroups) if work.norm.numel else 0)
    return LowerBound(rates.seconds(norm) + resources.get(resource, 0.0), resource)


def _kinds(step: SteadyStep) -> tuple[SteadyStep, Sequence[int]]:
    """Groups equal subgroups, so that each kind is computed only once. Returns a step with one subgroup of each kind,
    and the number of subgroups of each kind.

    Subgroups of one kind have the same sizes and the same placement. With storage paths no subgroups are grouped,
    because the waits for host slots depend on the order of the subgroups.
    """
    if step.rank.host_slots:
        return step, [1] * len(step.placements)
    sizes = [(s.numel, s.weight_bytes, s.grad_bytes, s.state_bytes) for s in step.rank.subgroups]
    counts = Counter(zip(sizes, step.placements, strict=True))
    rank = replace(step.rank, subgroups=[Subgroup(i, *size) for i, (size, _) in enumerate(counts)])
    return SteadyStep(rank, tuple(placement for _, placement in counts), step.order), [*counts.values()]


def _after_norm(work: Work) -> list[Op]:
    """The ops that cannot run before the norm is known: updates, the ops after them, and ops that wait for a host slot
    because an earlier subgroup uses it, or for a deferred slot. Deferred flushes, which `step()` does not wait for, are
    not returned.

    If the earlier subgroup is updated on the device, it uses only the state buffer of the slot. Then ops that copy a
    weight or a gradient into the other buffers of the slot do not wait, and are not returned.
    """
    used: set[tuple[int, Content]] = set()
    late: list[Op] = []
    for task in work.tasks:
        late += [op for op in task.ops if not (_is_early(op, used) or op.is_deferred)]
        used.update(buffer for op in task.ops for buffer in _slot_buffers(op))
    return late


def _is_early(op: Op, used: Container[tuple[int, Content]]) -> bool:
    waits = op.deferred_slot is not None or any(buffer in used for buffer in _slot_buffers(op))
    return op.kind in _MAY_BE_EARLY and not waits


def _slot_buffers(op: Op) -> list[tuple[int, Content]]:
    """The buffers (host slot, content) that the op uses."""
    if op.host_slot is None:
        return []
    return [(op.host_slot, content) for content in ([op.content] if op.content else ("state", "weight", "gradient"))]


def _takes_slot(op: Op) -> bool:
    return op.kind is OpKind.STATE_H2D and op.slot is not None
