"""Numbers ops that are in program order, and computes their minimal dependencies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tidegate.plan.ops import BufferId, Norms, Op, effects


def with_dependencies(
    order: Sequence[Op],
    lane_names: Sequence[str],
    num_subgroups: int,
    norms: Norms,
    *,
    chain: bool,
    waits: Mapping[int, int] | None = None,
) -> tuple[Op, ...]:
    """The ops with ids 0, 1, 2, … and their dependencies, none of them redundant.

    chain: each op also waits for the op before it in `order`, whatever its lane. waits: ops that also wait for one more
    op, by position in `order`.

    Dependencies are computed with vector clocks. `seen[i][lane]` is the last op of each lane that is certain to be done
    when op i is done: lanes run in order, so one number per lane describes the past of an op completely. `began[lane]`
    is the same for the moment when the lane's last op begins; a lane that may run ahead waits for that moment only.
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
        if waits and op_id in waits:
            found.add(waits[op_id])
        lane = lane_of[op_id]
        before = seen[last_in_lane[lane]] if lane in last_in_lane else nothing
        past = began.get(lane, nothing) if op.may_run_ahead else before
        deps: list[int] = []
        # Latest first: a dependency can only be implied by a later dependency.
        for dep in sorted(found, reverse=True):
            if dep > past[lane_of[dep]]:
                deps.append(dep)
                past = _merged(past, seen[dep])
        began[lane] = past
        seen.append(_merged(past, before))
        seen[op_id][lane] = last_in_lane[lane] = op_id
        linked.append(replace(op, id=op_id, deps=tuple(reversed(deps))))
    return tuple(linked)


def _merged(clock: Sequence[int], other: Sequence[int]) -> list[int]:
    """The element-wise maximum of two vector clocks."""
    return [max(pair) for pair in zip(clock, other, strict=True)]


def hazards(order: Sequence[Op], num_subgroups: int, norms: Norms) -> Iterator[set[int]]:
    """The data hazards of each op: positions of the earlier ops that must be done before it (read after write, write
    after write, write after read)."""
    writer: dict[BufferId, int] = {}
    readers: dict[BufferId, list[int]] = {}
    for position, op in enumerate(order):
        reads, writes = effects(op, num_subgroups, norms)
        found = {writer[place] for place in reads | writes if place in writer}
        for place in writes:
            found.update(readers.pop(place, ()))
            writer[place] = position
        for place in reads - writes:
            readers.setdefault(place, []).append(position)
        yield found
