"""One execution of a plan: the plan as a program for the native dispatcher, and the results of the ops that ran."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tidegate.agent.devices.base import DoneEvent, Event
from tidegate.kernels.dispatch import Gate, Program, ProgramOp, Task, TaskList
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


@dataclass(frozen=True, slots=True)
class PreparedOp:
    """An op that a lane runs without the interpreter.

    task: the native work.
    nbytes, numel: bytes that the op moves, and number of elements that it updates.
    completed: records that the task has succeeded; called once, in the thread that calls `finish` or `cancel`.
    again: runs the op after its task has failed, like `OpRunner.run`; None for a task that cannot fail.
    """

    task: Task
    nbytes: int = 0
    numel: int = 0
    completed: Callable[[], None] | None = None
    again: Callable[[Callable[[], None]], IssuedOp] | None = None


@dataclass
class PlanExecution:
    """One execution of a plan. The dispatcher numbers ops by their place in `plan.ops`, and the executions of ops
    (runs): a gradient copy that is repeated has two."""

    plan: Plan
    runs: dict[int, IssuedOp] = field(default_factory=dict)
    """By number of the run. A lane's thread adds its result before it tells the dispatcher that the op has ended."""
    errors: dict[int, BaseException] = field(default_factory=dict)
    prepared: dict[int, PreparedOp] = field(default_factory=dict)
    """By place of the op."""

    def places_of(self, ids: Collection[int]) -> list[int]:
        """The places of the ops with these ids."""
        return [self.plan.places[op] for op in ids]

    def prepare(self, ops: Mapping[int, PreparedOp]) -> TaskList:
        """Adds prepared ops, by id. Returns their tasks."""
        places = self.plan.places
        added = {places[op]: prepared for op, prepared in ops.items()}
        self.prepared |= added
        return TaskList([(place, prepared.task) for place, prepared in added.items()])

    def event_of(self, place: int, run: int, spans: Mapping[int, tuple[float, float]]) -> Event:
        """The event of an op that was issued. spans: the spans of the tasks that have run, by run."""
        return DoneEvent(*spans[run]) if run in spans else self.runs[run].event

    def complete(self, issued: Sequence[tuple[int, int]], spans: Mapping[int, tuple[float, float]]) -> None:
        """Records the success of the tasks that have run; to be called once, at the end. issued: places and runs of
        ops. spans: as for `event_of`."""
        for place, run in issued:
            if run in spans and (completed := self.prepared[place].completed) is not None:
                completed()


def program_of(plan: Plan, lanes: Sequence[str]) -> Program:
    """The plan as a program for the dispatcher. lanes: names of the dispatcher's lanes, in their order."""
    numbers = {lane: number for number, lane in enumerate(lanes)}
    return Program([_program_op(op, numbers[op.lane], [plan.places[dep] for dep in op.deps]) for op in plan.ops])


def _program_op(op: Op, lane: int, deps: list[int]) -> ProgramOp:
    copies_gradient, uses_copy = op.kind is OpKind.GRAD_D2H, op.kind is OpKind.CPU_UPDATE
    return lane, GATES[op.gate], op.subgroup, copies_gradient, uses_copy, deps
