"""The plan verifier: rejects plans that would give a wrong result, race or deadlock. Independent of the planner.

Rules, by their names in `PlanError.rule`: `subgroups`, `paths`, `placement`, `ids`, `slots`, `size`, `once`,
`processor`, `deferral`, `order` (an op waits for a later op: in-order lanes deadlock), `gate`, `race` (two ops access
the same place unordered, and one writes), `serial` (two ops of a one-at-a-time policy are unordered), `content` (an op
reads, or the step leaves, the wrong data: see `content_check`), `waste` (a copy that no placement needs).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final, NoReturn

from tidegate.errors import PlanError
from tidegate.plan.content_check import check_contents
from tidegate.plan.deferral_check import check_deferred_ops, check_deferred_order, check_gradient_memory
from tidegate.plan.ops import PATH_NAME, BufferId, Op, OpKind, effects, is_path
from tidegate.plan.plan import Placement, Plan

PATH_KINDS: Final = frozenset({OpKind.FETCH, OpKind.FLUSH})
HOST_GRAD_KINDS: Final = frozenset({OpKind.GRAD_D2H, OpKind.GRAD_H2D, OpKind.CPU_UPDATE})
HOST_SLOT_KINDS: Final = frozenset(
    {
        *PATH_KINDS,
        OpKind.STATE_H2D,
        OpKind.STATE_D2H,
        OpKind.WEIGHT_D2H,
        OpKind.WEIGHT_H2D,
        OpKind.CPU_UPDATE,
    }
)
"""Kinds of op that use the host slot of their subgroup, if it has one. Copies of gradients may use it, too."""
SLOT_KINDS: Final = frozenset({OpKind.STATE_H2D, OpKind.STATE_D2H, OpKind.GRAD_H2D, OpKind.DEVICE_UPDATE})
WEIGHT_KINDS: Final = frozenset({OpKind.WEIGHT_D2H, OpKind.CPU_UPDATE, OpKind.WEIGHT_H2D})
"""Kinds of op that use the weight slot of their subgroup, if it has one."""
UPDATE_KIND: Final = {"cpu": OpKind.CPU_UPDATE, "device": OpKind.DEVICE_UPDATE}


def verify(plan: Plan) -> None:
    """Checks that `plan` is correct; PlanError with the violated rule if not. Takes O(ops × lanes) time."""
    _check_placements(plan)
    _check_ops(plan)
    check_deferred_ops(plan)
    _check_counts(plan)
    before = _happens_before(plan)
    _check_gates(plan, before)
    _check_races(plan, before)
    check_deferred_order(plan, before)
    check_contents(plan)


def _refuse(rule: str, message: str) -> NoReturn:
    raise PlanError(message, rule)


def _check_placements(plan: Plan) -> None:
    if len(set(plan.paths)) != len(plan.paths) or not all(map(PATH_NAME.fullmatch, plan.paths)):
        _refuse("paths", f"Paths need names of 1 to 32 of a-z, 0-9, _ and -, each once: {plan.paths}.")
    if len(plan.subgroups) != len(plan.placements):
        _refuse("subgroups", f"{len(plan.subgroups)} subgroups have {len(plan.placements)} placements.")
    for i, (subgroup, placement) in enumerate(zip(plan.subgroups, plan.placements, strict=True)):
        if subgroup.id != i:
            _refuse("subgroups", f"The subgroup at place {i} has id {subgroup.id}.")
        if placement.processor == "cpu" and placement.after == "device":
            _refuse("placement", f"Subgroup {i} is updated on the CPU but its state should end on the device.")
        if placement.spilled and not placement.is_staged:
            _refuse("placement", f"Subgroup {i} is not staged, but its gradient should be spilled.")
        if any(is_path(residence) and residence not in plan.paths for residence in (placement.before, placement.after)):
            _refuse("paths", f"Subgroup {i} goes from {placement.before} to {placement.after}: paths are {plan.paths}.")
        _check_host_slot_use(plan, i, placement)
    check_gradient_memory(plan)


def _check_host_slot_use(plan: Plan, subgroup: int, placement: Placement) -> None:
    on_cpu = placement.processor == "cpu"
    if on_cpu and placement.uses_host_slot and placement.mirror_valid:
        _refuse("placement", f"Subgroup {subgroup} is updated in a host slot: no mirror of its weight is valid.")
    if placement.weight_in_slot and (not on_cpu or placement.uses_host_slot or placement.mirror_valid):
        _refuse("placement", f"Subgroup {subgroup} has no weight that could be in a weight slot.")
    if placement.grad_in_slot and not (placement.uses_host_slot and (on_cpu or placement.spilled)):
        _refuse("placement", f"Subgroup {subgroup} has no gradient that could be in a host slot.")
    if placement.grad_in_slot and plan.norms == "gradient":
        _refuse("placement", f"The gradient of subgroup {subgroup} cannot wait for a host slot: it is released early.")


def _check_ops(plan: Plan) -> None:
    """Checks each op on its own: its id, its dependencies, its slots and its size."""
    for position, op in enumerate(plan.ops):
        if op.id != position:
            _refuse("ids", f"The op at place {position} has id {op.id}.")
        if (op.subgroup == -1) != (op.kind is OpKind.NORM) or not -1 <= op.subgroup < len(plan.subgroups):
            _refuse("subgroups", f"Op {op.id} ({op.name}) is for a subgroup that does not exist.")
        # If this holds for all ops, dependencies ∪ lane order is acyclic: all edges lead to earlier ops.
        if any(not 0 <= dep < op.id for dep in op.deps) or len(set(op.deps)) != len(op.deps):
            _refuse("order", f"Op {op.id} ({op.name}) waits for {op.deps}: it can wait for each earlier op once.")
        if not (op.path in plan.paths if op.kind in PATH_KINDS else op.path is None):
            _refuse("paths", f"Op {op.id} ({op.name}) has path {op.path}: fetch and flush need one of {plan.paths}.")
        _check_slot(plan, op)
        _check_host_slot(plan, op)
        _check_weight_slot(plan, op)
        _check_size(plan, op)


def _check_slot(plan: Plan, op: Op) -> None:
    staged = op.kind in SLOT_KINDS and plan.placements[op.subgroup].is_staged
    if staged and (op.slot is None or not 0 <= op.slot < plan.num_slots):
        _refuse("slots", f"Op {op.id} ({op.name}) needs one of the slots 0 to {plan.num_slots - 1}, has {op.slot}.")
    if not staged and op.slot is not None:
        _refuse("slots", f"Op {op.id} ({op.name}) uses no slot, has {op.slot}.")
    by_way_of_host = op.kind in (OpKind.GRAD_H2D, OpKind.DEVICE_UPDATE) and plan.placements[op.subgroup].spilled
    if op.spilled != by_way_of_host:
        _refuse("placement", f"Op {op.id} ({op.name}) has spilled={op.spilled}, its placement {by_way_of_host}.")


def _check_host_slot(plan: Plan, op: Op) -> None:
    grad_in_slot = op.kind in HOST_GRAD_KINDS and plan.placements[op.subgroup].grad_in_slot
    if op.grad_in_slot != grad_in_slot:
        _refuse("placement", f"Op {op.id} ({op.name}) has grad_in_slot={op.grad_in_slot}, should have {grad_in_slot}.")
    needs_slot = grad_in_slot or (op.kind in HOST_SLOT_KINDS and plan.placements[op.subgroup].uses_host_slot)
    if needs_slot and (op.host_slot is None or not 0 <= op.host_slot < plan.num_host_slots):
        _refuse(
            "slots",
            f"Op {op.id} ({op.name}) needs one of the host slots 0 to {plan.num_host_slots - 1}, has {op.host_slot}.",
        )
    if not needs_slot and op.host_slot is not None:
        _refuse("slots", f"Op {op.id} ({op.name}) uses no host slot, has {op.host_slot}.")


def _check_weight_slot(plan: Plan, op: Op) -> None:
    if op.kind in WEIGHT_KINDS and plan.placements[op.subgroup].deferred:
        return  # `check_deferred_ops` checks it
    needs_slot = op.kind in WEIGHT_KINDS and plan.placements[op.subgroup].weight_in_slot
    if needs_slot and (op.weight_slot is None or not 0 <= op.weight_slot < plan.num_weight_slots):
        _refuse(
            "slots",
            f"Op {op.id} ({op.name}) needs one of the weight slots 0 to {plan.num_weight_slots - 1}, has "
            f"{op.weight_slot}.",
        )
    if not needs_slot and op.weight_slot is not None:
        _refuse("slots", f"Op {op.id} ({op.name}) uses no weight slot, has {op.weight_slot}.")


def _check_size(plan: Plan, op: Op) -> None:
    if op.kind is OpKind.NORM:
        expected = (0, sum(s.numel for s in plan.subgroups) if plan.norms == "step" else 0)
    elif op.content is None:
        expected = (0, plan.subgroups[op.subgroup].numel)
    else:
        expected = (plan.subgroups[op.subgroup].nbytes(op.content), 0)
    if (op.nbytes, op.numel) != expected:
        _refuse("size", f"Op {op.id} ({op.name}) has (nbytes, numel) {(op.nbytes, op.numel)}, should have {expected}.")


def _check_counts(plan: Plan) -> None:
    """Checks that no op is duplicated or unnecessary, and that each subgroup is updated on the processor of its
    placement."""
    counts = Counter((op.kind, op.subgroup) for op in plan.ops)
    for (kind, subgroup), count in counts.items():
        if count > 1:
            _refuse("once", f"{kind.value} of subgroup {subgroup} is there {count} times.")
    if counts[OpKind.NORM, -1] != 1:
        _refuse("once", "The norm is never computed.")
    for i, placement in enumerate(plan.placements):
        for processor, kind in UPDATE_KIND.items():
            if counts[kind, i] != (placement.processor == processor):
                _refuse("processor", f"Subgroup {i} is placed on {placement.processor}: {kind.value} must follow that.")
        if counts[OpKind.GRAD_NORM, i] != (plan.norms == "gradient"):
            _refuse(
                "once", f"Squares of subgroup {i} are summed {counts[OpKind.GRAD_NORM, i]} times: norms={plan.norms}."
            )
        for kind, useful in _useful_copies(placement).items():
            if counts[kind, i] and not useful:
                _refuse("waste", f"{kind.value} of subgroup {i} is not needed: its placement is {placement}.")


def _useful_copies(placement: Placement) -> dict[OpKind, bool]:
    on_cpu = placement.processor == "cpu"
    return {
        OpKind.GRAD_D2H: on_cpu or placement.spilled,
        OpKind.GRAD_H2D: placement.spilled,
        OpKind.WEIGHT_D2H: on_cpu and not placement.mirror_valid,
        OpKind.WEIGHT_H2D: on_cpu,
        OpKind.STATE_H2D: not on_cpu and placement.before != "device",
        OpKind.STATE_D2H: placement.before == "device" if on_cpu else placement.after != "device",
        OpKind.FETCH: is_path(placement.before),
        OpKind.FLUSH: is_path(placement.after),
    }


@dataclass(frozen=True, slots=True)
class _HappensBefore:
    """The happens-before relation of a plan, as vector clocks: `begins[i][lane]` is the number of ops of that lane that
    are certain to be done when op i begins. `lane` and `rank`: the lane of each op and its index on that lane."""

    lane: tuple[int, ...]
    rank: tuple[int, ...]
    begins: tuple[tuple[int, ...], ...]

    def __call__(self, first: int, second: int) -> bool:
        return self.begins[second][self.lane[first]] > self.rank[first]


def _happens_before(plan: Plan) -> _HappensBefore:
    """The happens-before relation of the ops of `plan`. All lanes end their ops in order. Path lanes, which may run
    ahead, also begin them in order; the other lanes begin an op only after the previous op has ended."""
    number = {name: i for i, name in enumerate(plan.lane_names)}
    lane = tuple(number[op.lane] for op in plan.ops)
    rank: list[int] = []
    begins: list[tuple[int, ...]] = []
    ends: list[tuple[int, ...]] = []
    nothing = (0,) * len(number)
    last_begun, last_ended = [nothing] * len(number), [nothing] * len(number)
    for op in plan.ops:
        mine = lane[op.id]
        begin = _latest(last_begun[mine] if op.may_run_ahead else last_ended[mine], *(ends[dep] for dep in op.deps))
        end = list(_latest(begin, last_ended[mine]))
        rank.append(end[mine])
        end[mine] += 1
        last_begun[mine], last_ended[mine] = begin, tuple(end)
        begins.append(begin)
        ends.append(last_ended[mine])
    return _HappensBefore(lane, tuple(rank), tuple(begins))


def _latest(*clocks: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(max, zip(*clocks, strict=True)))


def _check_gates(plan: Plan, before: _HappensBefore) -> None:
    """Checks that no copy or norm of a gradient waits for the norm of the step; PlanError if one does.

    Such an op is meant to run during the backward, as soon as its gradient has arrived, but the norm of the step is
    known only after the last gradient. Only a copy of a gradient into a host slot (`grad_in_slot`) may wait longer,
    until the slot is free.
    """
    norm = next(op.id for op in plan.ops if op.kind is OpKind.NORM)
    for op in plan.of_kind(OpKind.GRAD_D2H, OpKind.GRAD_NORM):
        if before(norm, op.id) and not op.grad_in_slot:
            _refuse("gate", f"Op {op.id} ({op.name}) takes a gradient as it arrives but waits for the step.")


def _check_races(plan: Plan, before: _HappensBefore) -> None:
    """Checks that two ops are ordered if they access the same place and one of them writes it; PlanError if not. For
    policies that run one op at a time, also checks that all ops are ordered.

    It is enough to check each access against the last write of the place, and each write against the reads since then:
    the other pairs are ordered too, because happens-before is transitive.
    """
    last_write: dict[BufferId, int] = {}
    reads_since: dict[BufferId, list[int]] = {}
    for op in plan.ops:
        reads, writes = effects(op, len(plan.subgroups), plan.norms)
        for place in reads | writes:
            rivals = [last_write[place]] if place in last_write else []
            if place in writes:
                rivals += reads_since.get(place, [])
                last_write[place], reads_since[place] = op.id, []
            else:
                reads_since.setdefault(place, []).append(op.id)
            for rival in rivals:
                if not before(rival, op.id):
                    _refuse("race", f"Ops {rival} ({plan.ops[rival].name}) and {op.id} ({op.name}) race for {place}.")
    if plan.policy != "interleaved":
        for op in plan.ops[1:]:
            if not before(op.id - 1, op.id):
                _refuse("serial", f"{plan.policy} does one op at a time: {op.id - 1} and {op.id} are not ordered.")
