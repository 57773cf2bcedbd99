"""One execution of a plan: the plan as a program for the native dispatcher, and the results of the ops that ran."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import NamedTuple

from tidegate.agent.devices.base import DoneEvent, Event
from tidegate.kernels.dispatch import Gate, Program, ProgramOp, Task, TaskList
from tidegate.plan.ops import Op, OpKind
from tidegate.plan.plan import Plan
from tidegate.timeline.timeline import Span

IssuedRun = tuple[int, int, float, float]
"""Place of an op and number of the run; start and end of its task, NaN without one."""
GATES = {"none": Gate.NONE, "gradient": Gate.GRADIENT, "step": Gate.STEP}


class IssuedOp(NamedTuple):
    """Result of issuing an op: the event at its end, the bytes that it moves, and the number of elements that it
    updates or reads."""

    event: Event
    nbytes: int
    numel: int


class PreparedOp(NamedTuple):
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
    (runs): a gradient copy that is repeated has two. ahead: the lanes that run ahead."""

    plan: Plan
    ahead: Collection[str] = ()
    runs: dict[int, IssuedOp] = field(default_factory=dict)
    """By number of the run. A lane's thread adds its result before it tells the dispatcher that the op has ended."""
    errors: dict[int, BaseException] = field(default_factory=dict)
    prepared: dict[int, PreparedOp] = field(default_factory=dict)
    """By place of the op; without the ops whose runs were collected."""
    spans: list[Span | None] = field(default_factory=list)
    """Spans of the runs that were collected, in the order in which they ended; None until the end of the run is
    known."""
    _lane_ends: dict[str, float] = field(default_factory=dict)
    _open: list[tuple[int, int, int]] = field(default_factory=list)
    """Runs that were collected before they were done on the device: index in `spans`, place of the op, and run."""

    def places_of(self, ids: Collection[int]) -> list[int]:
        """The places of the ops with these ids."""
        return [self.plan.places[op] for op in ids]

    def prepare(self, ops: Mapping[int, PreparedOp]) -> TaskList:
        """Adds prepared ops, by id. Returns their tasks."""
        places = self.plan.places
        added = {places[op]: prepared for op, prepared in ops.items()}
        self.prepared |= added
        return TaskList([(place, prepared.task) for place, prepared in added.items()])

    def event_of(self, issued: IssuedRun) -> Event:
        """The event of an op that was issued."""
        _, run, start, end = issued
        return self.runs[run].event if isnan(start) else DoneEvent(start, end)

    def collect(self, issued: Sequence[IssuedRun]) -> None:
        """Adds the spans of runs that were issued after those that are collected already, and records the success of
        tasks. It may be called while other ops run; it waits for nothing."""
        for place, run, start, end in issued:
            if not isnan(start):
                prepared = self.prepared[place]
                if prepared.completed is not None:
                    prepared.completed()
                self.spans.append(self._span(place, start, end, prepared))
                del self.prepared[place]
                continue
            done = self.runs[run]
            if isinstance(done.event, DoneEvent):
                self.spans.append(self._span(place, *done.event.span(), done))
            else:
                self._open.append((len(self.spans), place, run))
                self.spans.append(None)

    def all_spans(self) -> tuple[Span, ...]:
        """The spans of all runs that were collected. Waits for the end of each."""
        for index, place, run in self._open:
            done = self.runs[run]
            done.event.wait()
            self.spans[index] = self._span(place, *done.event.span(), done)
        self._open.clear()
        return tuple(span for span in self.spans if span is not None)

    def _span(self, place: int, start: float, end: float, done: IssuedOp | PreparedOp) -> Span:
        op, lane = self.plan.ops[place], self.plan.lanes_of_ops[place]
        if lane in self.ahead:
            start = max(start, self._lane_ends.get(lane, start))
            end = self._lane_ends[lane] = max(start, end)
        return Span(op.id, op.kind, lane, op.subgroup, start, end, done.nbytes, done.numel, op.content, op.slot)


def program_of(plan: Plan, lanes: Sequence[str]) -> Program:
    """The plan as a program for the dispatcher. lanes: names of the dispatcher's lanes, in their order."""
    numbers = {lane: number for number, lane in enumerate(lanes)}
    return Program([
        _program_op(op, numbers[lane], [plan.places[dep] for dep in op.deps])
        for op, lane in zip(plan.ops, plan.lanes_of_ops, strict=True)
    ])  # fmt: skip


def _program_op(op: Op, lane: int, deps: list[int]) -> ProgramOp:
    copies_gradient, uses_copy = op.kind is OpKind.GRAD_D2H, op.kind is OpKind.CPU_UPDATE
    return lane, GATES[op.gate], op.subgroup, copies_gradient, uses_copy, deps
