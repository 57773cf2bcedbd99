"""Refuses plans that would give a wrong result, race or deadlock. Knows nothing of how plans are made.

Rules, by the name that `PlanError.rule` carries: `subgroups`, `placement`, `ids`, `slots`, `size`, `once`,
`processor`, `order` (an op waits for a later one: in-order lanes deadlock), `gate`, `race` (two ops meet in a place
unordered), `serial` (two ops of a one-at-a-time policy are unordered), `content` (an op reads, or the step leaves, the
wrong thing), `waste` (a copy that no placement calls for).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, NoReturn

from tidegate.errors import PlanError
from tidegate.plan.ops import LANES, SCALE, Op, OpKind, Place, effects
from tidegate.plan.plan import Placement, Plan

SLOT_KINDS: Final = frozenset({OpKind.STATE_H2D, OpKind.STATE_D2H, OpKind.GRAD_H2D, OpKind.DEVICE_UPDATE})
UPDATE_KIND: Final = {"cpu": OpKind.CPU_UPDATE, "device": OpKind.DEVICE_UPDATE}


def verify(plan: Plan) -> None:
    """Returns when `plan` is correct; raises PlanError with the rule that it breaks. O(ops × lanes)."""
    _check_placements(plan)
    _check_ops(plan)
    _check_counts(plan)
    before = _happens_before(plan)
    _check_gates(plan, before)
    _check_races(plan, before)
    _check_contents(plan)


def _refuse(rule: str, message: str) -> NoReturn:
    raise PlanError(message, rule)


def _check_placements(plan: Plan) -> None:
    if len(plan.subgroups) != len(plan.placements):
        _refuse("subgroups", f"{len(plan.subgroups)} subgroups have {len(plan.placements)} placements.")
    for i, (subgroup, placement) in enumerate(zip(plan.subgroups, plan.placements, strict=True)):
        if subgroup.id != i:
            _refuse("subgroups", f"The subgroup at place {i} has id {subgroup.id}.")
        if placement.processor == "cpu" and placement.after == "device":
            _refuse("placement", f"Subgroup {i} is updated on the CPU but its state should end on the device.")
        if placement.spilled and not placement.is_staged:
            _refuse("placement", f"Subgroup {i} is not staged, but its gradient should be spilled.")


def _check_ops(plan: Plan) -> None:
    """Each op by itself: its id, whom it waits for, its slot and its size."""
    for position, op in enumerate(plan.ops):
        if op.id != position:
            _refuse("ids", f"The op at place {position} has id {op.id}.")
        if (op.subgroup == -1) != (op.kind is OpKind.NORM) or not -1 <= op.subgroup < len(plan.subgroups):
            _refuse("subgroups", f"Op {op.id} ({op.name}) is for a subgroup that does not exist.")
        # With this for all ops, dependencies ∪ lane order is acyclic: both only ever point back.
        if any(not 0 <= dep < op.id for dep in op.deps) or len(set(op.deps)) != len(op.deps):
            _refuse("order", f"Op {op.id} ({op.name}) waits for {op.deps}: it can wait for each earlier op once.")
        _check_slot(plan, op)
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
    """Nothing is done twice or in vain, and every subgroup is updated where its placement says."""
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
        OpKind.STATE_H2D: not on_cpu and placement.before == "host",
        OpKind.STATE_D2H: placement.after == "host" and (not on_cpu or placement.before == "device"),
    }


@dataclass(frozen=True, slots=True)
class _HappensBefore:
    """Vector clocks. `clocks[i][lane]` counts the ops of that lane which are sure to be done when op i is."""

    lane: tuple[int, ...]
    rank: tuple[int, ...]
    clocks: tuple[tuple[int, ...], ...]

    def __call__(self, first: int, second: int) -> bool:
        return self.clocks[second][self.lane[first]] > self.rank[first]


def _happens_before(plan: Plan) -> _HappensBefore:
    lane = tuple(LANES.index(op.lane) for op in plan.ops)
    rank: list[int] = []
    clocks: list[tuple[int, ...]] = []
    tips: list[tuple[int, ...]] = [(0,) * len(LANES)] * len(LANES)
    for op in plan.ops:
        mine = lane[op.id]
        clock = list(map(max, zip(tips[mine], *(clocks[dep] for dep in op.deps), strict=True)))
        rank.append(clock[mine])
        clock[mine] += 1
        tips[mine] = tuple(clock)
        clocks.append(tips[mine])
    return _HappensBefore(lane, tuple(rank), tuple(clocks))


def _check_gates(plan: Plan, before: _HappensBefore) -> None:
    """What is done with a gradient as it arrives never waits for the step, which comes after all gradients."""
    norm = next(op.id for op in plan.ops if op.kind is OpKind.NORM)
    for op in plan.of_kind(OpKind.GRAD_D2H, OpKind.GRAD_NORM):
        if before(norm, op.id):
            _refuse("gate", f"Op {op.id} ({op.name}) takes a gradient as it arrives but waits for the step.")


def _check_races(plan: Plan, before: _HappensBefore) -> None:
    """Any two ops that meet in a place, one of them writing, are ordered.

    It is enough that each access is ordered against the last write and each write against the reads since: the rest
    follows because happens-before is transitive.
    """
    last_write: dict[Place, int] = {}
    reads_since: dict[Place, list[int]] = {}
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


class Thing(NamedTuple):
    """What lies in a place: which content of which subgroup, from before its update or after it."""

    what: Literal["gradient", "weight", "state", "squares", "scale"]
    subgroup: int
    version: Literal["old", "new"]


@dataclass
class _Machine:
    """Runs a plan on names instead of numbers. Races are excluded before, so program order stands for every order."""

    plan: Plan
    contents: dict[Place, Thing] = field(default_factory=dict)

    def expect(self, op: Op, place: Place, thing: Thing) -> None:
        held = self.contents.get(place)
        if held != thing:
            _refuse("content", f"Op {op.id} ({op.name}) needs {thing} in {place}, which holds {held}.")

    def copy(self, op: Op, source: Place, target: Place, what: Literal["gradient", "weight", "state"]) -> None:
        held = self.contents.get(source)
        if held is None or (held.what, held.subgroup) != (what, op.subgroup):
            _refuse("content", f"Op {op.id} ({op.name}) copies the {what} from {source}, which holds {held}.")
        self.contents[target] = held

    def update(self, op: Op, gradient: Place, state: Place, weight: Place) -> None:
        s = op.subgroup
        self.expect(op, SCALE, Thing("scale", -1, "new"))
        self.expect(op, gradient, Thing("gradient", s, "new"))
        self.expect(op, state, Thing("state", s, "old"))
        self.expect(op, weight, Thing("weight", s, "old"))
        self.contents[state] = Thing("state", s, "new")
        self.contents[weight] = Thing("weight", s, "new")

    def run(self, op: Op) -> None:
        s = op.subgroup
        match op.kind:
            case OpKind.GRAD_NORM:
                self.expect(op, ("device_grad", s), Thing("gradient", s, "new"))
                self.contents[("squares", s)] = Thing("squares", s, "new")
            case OpKind.NORM:
                if self.plan.norms == "gradient":
                    for i in range(len(self.plan.subgroups)):
                        self.expect(op, ("squares", i), Thing("squares", i, "new"))
                self.contents[SCALE] = Thing("scale", -1, "new")
            case OpKind.GRAD_D2H:
                self.copy(op, ("device_grad", s), ("host_grad", s), "gradient")
            case OpKind.GRAD_H2D:
                self.copy(op, ("host_grad", s), op.gradient, "gradient")
            case OpKind.WEIGHT_D2H:
                self.copy(op, ("device_weight", s), ("host_weight", s), "weight")
            case OpKind.WEIGHT_H2D:
                self.expect(op, ("host_weight", s), Thing("weight", s, "new"))
                self.copy(op, ("host_weight", s), ("device_weight", s), "weight")
            case OpKind.STATE_H2D:
                self.copy(op, ("host_state", s), op.buffer, "state")
            case OpKind.STATE_D2H:
                self.copy(op, op.buffer, ("host_state", s), "state")
            case OpKind.CPU_UPDATE:
                self.update(op, ("host_grad", s), ("host_state", s), ("host_weight", s))
            case OpKind.DEVICE_UPDATE:
                self.update(op, op.gradient, op.buffer, ("device_weight", s))


def _home(residence: str, subgroup: int) -> Place:
    return ("resident" if residence == "device" else "host_state", subgroup)


def _check_contents(plan: Plan) -> None:
    machine = _Machine(plan)
    for i, placement in enumerate(plan.placements):
        machine.contents[("device_grad", i)] = Thing("gradient", i, "new")
        machine.contents[("device_weight", i)] = Thing("weight", i, "old")
        machine.contents[_home(placement.before, i)] = Thing("state", i, "old")
        if placement.mirror_valid:
            machine.contents[("host_weight", i)] = Thing("weight", i, "old")
    for op in plan.ops:
        machine.run(op)
    for i, placement in enumerate(plan.placements):
        left = {_home(placement.after, i): Thing("state", i, "new"), ("device_weight", i): Thing("weight", i, "new")}
        if placement.processor == "cpu":
            left[("host_weight", i)] = Thing("weight", i, "new")
        for place, thing in left.items():
            held = machine.contents.get(place)
            if held != thing:
                _refuse("content", f"The step must leave {thing} in {place}, which holds {held}.")
