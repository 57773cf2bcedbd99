"""One execution of a plan: the plan as a program for the native dispatcher, and the results of the ops that ran."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from tidegate.agent.devices.base import Event
from tidegate.kernels.dispatch import Gate, ProgramOp
from tidegate.plan.ops import Op, OpKind
from tidegate.plan.plan import Plan

GATES = {"none": Gate.NONE, "gradient": Gate.GRADIENT, "step": Gate.STEP}


@dataclass(frozen=True, slots=True)
class IssuedOp:
    """Result of issuing an op: the event at its end, the bytes that it moves, and the number of elements that it
    updates or reads."""

    event: Event
    nbytes: int
    numel: int


@dataclass
class PlanExecution:
    """One execution of a plan. The dispatcher numbers ops by their place in `plan.ops`, and the executions of ops
    (runs): a gradient copy that is repeated has two."""

    plan: Plan
    runs: dict[int, IssuedOp] = field(default_factory=dict)
    """By number of the run. A lane's thread adds its result before it tells the dispatcher that the op has ended."""
    errors: dict[int, BaseException] = field(default_factory=dict)

    def places_of(self, ids: Collection[int]) -> list[int]:
        """The places of the ops with these ids."""
        return [self.plan.places[op] for op in ids]


def program_of(plan: Plan, lanes: Sequence[str]) -> list[ProgramOp]:
    """The plan as a program for the dispatcher. lanes: names of the dispatcher's lanes, in their order."""
    numbers = {lane: number for number, lane in enumerate(lanes)}
    return [_program_op(op, numbers[op.lane], [plan.places[dep] for dep in op.deps]) for op in plan.ops]


def _program_op(op: Op, lane: int, deps: list[int]) -> ProgramOp:
    copies_gradient, uses_copy = op.kind is OpKind.GRAD_D2H, op.kind is OpKind.CPU_UPDATE
    return lane, GATES[op.gate], op.subgroup, copies_gradient, uses_copy, deps
