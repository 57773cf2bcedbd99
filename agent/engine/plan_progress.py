"""How far the execution of one plan has come: which ops are pending, running and issued (done, or enqueued on the
device), and which gates are open. A closed gate keeps ops waiting for a gradient or for the call of `step()`."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from tidegate.agent.devices.base import Event
from tidegate.plan.ops import Op, OpKind
from tidegate.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class IssuedOp:
    """Result of issuing an op: the event at its end, the bytes that it moves, and the number of elements that it
    updates or reads."""

    event: Event
    nbytes: int
    numel: int


@dataclass(slots=True, eq=False)
class RunningOp:
    """An op in progress. `since`: time at which it began or, if later, at which the op before it in its lane ended
    (seconds of the clock). `begun`: whether all its work is queued, so that the next op of the lane may begin."""

    op: Op
    since: float
    begun: bool = False


@dataclass
class PlanProgress:
    """All mutable state of one plan that is being executed; guarded by the clock's lock."""

    plan: Plan
    pending: dict[str, deque[Op]]
    issued: dict[int, IssuedOp] = field(default_factory=dict)
    history: list[tuple[Op, IssuedOp]] = field(default_factory=list)
    running: dict[str, deque[RunningOp]] = field(default_factory=dict)
    """Ops in progress by lane, the oldest first. A lane without ops in progress has no entry."""
    gradients: set[int] = field(default_factory=set)
    """Subgroups whose gate `gradient` is open: their gradients have arrived."""
    stepping: bool = False
    """Whether the gate `step` is open: `step()` was called."""
    recopying: set[int] = field(default_factory=set)
    """Subgroups whose gradient must be copied again before they are updated."""
    recopied: dict[int, Event] = field(default_factory=dict)
    """Events at the end of the repeated gradient copies, by subgroup."""
    skipped: bool = False
    error: BaseException | None = None

    def gate_open(self, op: Op) -> bool:
        """Whether this op has no gate or an open one: it does not wait for a gradient or for the call of `step()`."""
        match op.gate:
            case "gradient":
                return self.stepping or op.subgroup in self.gradients
            case "step":
                return self.stepping
        return True

    def may_run(self, op: Op) -> bool:
        """Whether this op may begin: its gate is open, all its dependencies are issued, and it does not wait for a
        repeated gradient copy."""
        # Plans leave out dependencies that follow from the order of a lane, and a repeated copy breaks this order.
        if op.kind is OpKind.CPU_UPDATE and op.subgroup in self.recopying:
            return False
        return self.gate_open(op) and all(dep in self.issued for dep in op.deps)

    @property
    def is_done(self) -> bool:
        """Whether the execution has ended: no op is running, and either no op is pending or an error prevents that
        pending ops begin."""
        return not self.running and (self.error is not None or not any(self.pending.values()))

    def is_any_running(self, ids: Collection[int]) -> bool:
        """Whether an op with one of these ids is running."""
        return any(op.op.id in ids for running in self.running.values() for op in running)

    def drop_pending(self) -> None:
        """Drops the ops that have not begun."""
        for queue in self.pending.values():
            queue.clear()
