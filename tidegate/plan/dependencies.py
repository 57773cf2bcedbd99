"""Gives ops that stand in one order their ids and the dependencies that they need, none of them redundant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tidegate.plan.ops import Norms, Op, Place, effects


def link(
    order: Sequence[Op], lane_names: Sequence[str], num_subgroups: int, norms: Norms, *, chain: bool
) -> tuple[Op, ...]:
    """Numbers the ops and gives each the dependencies it needs. `chain`: each op waits for the one before, too.

    `seen[i][lane]` is the last op of each lane that is sure to be done when op i is: lanes run in order, so that one
    number per lane says everything about the past of an op. `began[lane]` is the same for when the lane's last op
    begins, which is all that a lane which runs ahead waits for.
    """
    number = {name: i for i, name in enumerate(lane_names)}
    lane_of = [number[op.lane] for op in order]
    nothing = [-1] * len(lane_names)
    seen: list[list[int]] = []
    last_in_lane: dict[int, int] = {}
    began: dict[int, list[int]] = {}
    linked: list[Op] = []
    for op_id, (op, found) in enumerate(zip(order, hazards(order, num_subgroups, norms), strict=True)):
        if chain and op_id:
            found.add(op_id - 1)
        lane = lane_of[op_id]
        before = seen[last_in_lane[lane]] if lane in last_in_lane else nothing
        past = began.get(lane, nothing) if op.may_run_ahead else before
        deps: list[int] = []
        # Latest first: an op can only be implied by a later one.
        for dep in sorted(found, reverse=True):
            if dep > past[lane_of[dep]]:
                deps.append(dep)
                past = _both(past, seen[dep])
        began[lane] = past
        seen.append(_both(past, before))
        seen[op_id][lane] = last_in_lane[lane] = op_id
        linked.append(replace(op, id=op_id, deps=tuple(reversed(deps))))
    return tuple(linked)


def _both(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [max(pair) for pair in zip(one, other, strict=True)]


def hazards(order: Sequence[Op], num_subgroups: int, norms: Norms) -> Iterator[set[int]]:
    """For each op, the earlier ops it must not overtake: read after write, write after write, write after read."""
    writer: dict[Place, int] = {}
    readers: dict[Place, list[int]] = {}
    for position, op in enumerate(order):
        reads, writes = effects(op, num_subgroups, norms)
        found = {writer[place] for place in reads | writes if place in writer}
        for place in writes:
            found.update(readers.pop(place, ()))
            writer[place] = position
        for place in reads - writes:
            readers.setdefault(place, []).append(position)
        yield found
