"""Symbolic execution of a plan: tracks which data each place holds, and rejects the plan when an op reads, or the step
leaves behind, the wrong data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, NoReturn

from tidegate.errors import PlanError
from tidegate.plan.ops import SCALE, BufferId, Op, OpKind, Residence
from tidegate.plan.plan import Plan


def _refuse(message: str) -> NoReturn:
    raise PlanError(message, "content")


class BufferContent(NamedTuple):
    """The data that a place holds: a kind of content, its subgroup, and its version (before or after the update)."""

    what: Literal["gradient", "weight", "state", "squares", "scale"]
    subgroup: int
    version: Literal["old", "new"]


@dataclass
class _Machine:
    """Executes a plan on symbols instead of numbers. Races have been excluded before this, so checking program order
    covers every order in which the ops can run."""

    plan: Plan
    contents: dict[BufferId, BufferContent] = field(default_factory=dict)
    overlapping: dict[BufferId, set[BufferId]] = field(default_factory=dict)
    """The deferred slots that take the memory of each gradient, and the reverse: what is written to one of them is lost
    in the others."""

    def wrote(self, place: BufferId) -> None:
        for other in self.overlapping.get(place, ()):
            self.contents.pop(other, None)

    def expect(self, op: Op, place: BufferId, thing: BufferContent) -> None:
        held = self.contents.get(place)
        if held != thing:
            _refuse(f"Op {op.id} ({op.name}) needs {thing} in {place}, which holds {held}.")

    def copy(self, op: Op, source: BufferId, target: BufferId, what: Literal["gradient", "weight", "state"]) -> None:
        held = self.contents.get(source)
        if held is None or (held.what, held.subgroup) != (what, op.subgroup):
            _refuse(f"Op {op.id} ({op.name}) copies the {what} from {source}, which holds {held}.")
        self.contents[target] = held
        self.wrote(target)

    def update(self, op: Op, gradient: BufferId, state: BufferId, weight: BufferId) -> None:
        s = op.subgroup
        self.expect(op, SCALE, BufferContent("scale", -1, "new"))
        self.expect(op, gradient, BufferContent("gradient", s, "new"))
        self.expect(op, state, BufferContent("state", s, "old"))
        self.expect(op, weight, BufferContent("weight", s, "old"))
        self.contents[state] = BufferContent("state", s, "new")
        self.contents[weight] = BufferContent("weight", s, "new")

    def run(self, op: Op) -> None:
        s = op.subgroup
        match op.kind:
            case OpKind.GRAD_NORM:
                self.expect(op, ("device_grad", s), BufferContent("gradient", s, "new"))
                self.contents[("squares", s)] = BufferContent("squares", s, "new")
            case OpKind.NORM:
                if self.plan.norms == "gradient":
                    for i in range(len(self.plan.subgroups)):
                        self.expect(op, ("squares", i), BufferContent("squares", i, "new"))
                self.contents[SCALE] = BufferContent("scale", -1, "new")
            case OpKind.GRAD_D2H:
                self.copy(op, ("device_grad", s), op.host_grad, "gradient")
            case OpKind.GRAD_H2D:
                self.copy(op, op.host_grad, op.gradient, "gradient")
            case OpKind.WEIGHT_D2H:
                self.copy(op, ("device_weight", s), op.host_weight, "weight")
            case OpKind.WEIGHT_H2D:
                self.expect(op, op.host_weight, BufferContent("weight", s, "new"))
                self.copy(op, op.host_weight, ("device_weight", s), "weight")
            case OpKind.STATE_H2D:
                self.copy(op, op.host_state, op.buffer, "state")
            case OpKind.STATE_D2H:
                self.copy(op, op.buffer, op.host_state, "state")
            case OpKind.CPU_UPDATE:
                self.update(op, op.host_grad, op.host_state, op.host_weight)
            case OpKind.DEVICE_UPDATE:
                self.update(op, op.gradient, op.buffer, ("device_weight", s))
            case OpKind.FETCH:
                self.copy(op, op.stored, op.host_state, "state")
            case OpKind.FLUSH:
                self.copy(op, op.host_state, op.stored, "state")


def _home(residence: Residence, subgroup: int) -> BufferId:
    names = {"device": "resident", "host": "host_state"}
    return (names.get(residence, f"path:{residence}"), subgroup)


def _overlapping(plan: Plan) -> dict[BufferId, set[BufferId]]:
    found: dict[BufferId, set[BufferId]] = {}
    memory = plan.gradient_memory
    if memory is not None:
        for kind, slots in (("deferred_slot", memory.slots), ("deferred_weight", memory.weight_slots)):
            for number, slot in enumerate(slots):
                for subgroup in slot.covers:
                    found.setdefault(("host_grad", subgroup), set()).add((kind, number))
                    found.setdefault((kind, number), set()).add(("host_grad", subgroup))
    return found


def check_contents(plan: Plan) -> None:
    """Checks that every op reads, and the step leaves, the right data; PlanError with the rule `content` if not.

    The step must leave updated state in the residence that each placement names, and updated weights. Older copies may
    remain in other places.
    """
    machine = _Machine(plan, overlapping=_overlapping(plan))
    for i, placement in enumerate(plan.placements):
        machine.contents[("device_grad", i)] = BufferContent("gradient", i, "new")
        machine.contents[("device_weight", i)] = BufferContent("weight", i, "old")
        machine.contents[_home(placement.before, i)] = BufferContent("state", i, "old")
        if placement.mirror_valid:
            machine.contents[("host_weight", i)] = BufferContent("weight", i, "old")
    for op in plan.ops:
        machine.run(op)
    for i, placement in enumerate(plan.placements):
        left = {
            _home(placement.after, i): BufferContent("state", i, "new"),
            ("device_weight", i): BufferContent("weight", i, "new"),
        }
        if placement.leaves_mirror:
            left[("host_weight", i)] = BufferContent("weight", i, "new")
        for place, thing in left.items():
            held = machine.contents.get(place)
            if held != thing:
                _refuse(f"The step must leave {thing} in {place}, which holds {held}.")
