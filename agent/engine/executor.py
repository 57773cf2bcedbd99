"""Executes a plan: each lane in order, waiting on dependencies, gates and nothing else.

A lane has one thread. One that runs ahead has two, which take turns: while one waits for its op, the other hands over
the next, as soon as its dependencies let it, so that the disk never waits until a Python thread has a core again. Ops
of such a lane begin in order and end in order (one that is done early counts as running until those before it are done,
too); what else they need, their dependencies say.

Before the gate `step` opens, ops only copy into scratch: they may be repeated (a gradient changed after it was
copied) or dropped (`cancel`) at no cost but time.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from tidegate.agent.cleanup import close_all
from tidegate.agent.devices.base import Event
from tidegate.agent.engine.clock import Clock
from tidegate.agent.engine.interpreter_exit import ends_with_process
from tidegate.agent.engine.last_references import LONGEST_WAIT_SECONDS, let_go
from tidegate.errors import EngineError, LaneStuckError
from tidegate.plan.ops import LANES, Op, OpKind
from tidegate.plan.plan import Plan
from tidegate.timeline.timeline import Span


class StepSkipped(Exception):
    """Raised by the runner of NORM: the gradients are not finite, the rest of the plan is dropped."""


@dataclass(frozen=True, slots=True)
class Issued:
    """An op that was handed to its lane, and what it really moved."""

    event: Event
    nbytes: int
    numel: int


class OpRunner(Protocol):
    """How ops are carried out. `wait` makes a lane wait for an event, `run` enqueues the op on its lane.

    `run` may call `begun` when the next op of a lane that runs ahead may begin, too: never before all that it does
    itself is queued.
    """

    def wait(self, lane: str, event: Event) -> None: ...

    def run(self, op: Op, begun: Callable[[], None]) -> Issued: ...


@dataclass(slots=True, eq=False)
class _Running:
    """An op in progress. `since`: when it began, or when the last one before it in its lane ended."""

    op: Op
    since: float
    begun: bool = False


@dataclass
class _Progress:
    """All mutable state of one plan in flight; guarded by the clock's lock."""

    plan: Plan
    pending: dict[str, deque[Op]]
    issued: dict[int, Issued] = field(default_factory=dict)
    history: list[tuple[Op, Issued]] = field(default_factory=list)
    running: dict[str, deque[_Running]] = field(default_factory=dict)
    """By lane; lanes without any are left out."""
    gradients: set[int] = field(default_factory=set)
    stepping: bool = False
    recopying: set[int] = field(default_factory=set)
    """Subgroups whose gradient must be copied again before they are updated."""
    recopied: dict[int, Event] = field(default_factory=dict)
    skipped: bool = False
    error: BaseException | None = None

    def gate_open(self, op: Op) -> bool:
        match op.gate:
            case "gradient":
                return self.stepping or op.subgroup in self.gradients
            case "step":
                return self.stepping
        return True

    def may_run(self, op: Op) -> bool:
        # Plans leave out dependencies that lane order implies, and a repeated copy breaks that order.
        if op.kind is OpKind.CPU_UPDATE and op.subgroup in self.recopying:
            return False
        return self.gate_open(op) and all(dep in self.issued for dep in op.deps)


class Executor:
    """Runs one plan at a time on persistent lane threads. Not re-entrant: one thread drives it."""

    def __init__(
        self,
        runner: OpRunner,
        clock: Clock,
        *,
        lanes: Sequence[str] = LANES,
        ahead: Collection[str] = (),
        watchdog_seconds: float = 120.0,
        on_thread_end: Callable[[], None] | None = None,
    ) -> None:
        """`lanes`: all that plans may have; `ahead`: those of them that begin an op before the last one has ended."""
        self._runner = runner
        self._clock = clock
        self._lanes = tuple(lanes)
        self._ahead = frozenset(ahead)
        self._watchdog_seconds = watchdog_seconds
        self._on_thread_end = on_thread_end
        self._progress: _Progress | None = None
        self._pid = os.getpid()
        self.closed = False
        self.stuck = False
        self._threads = [
            threading.Thread(
                target=_serve,
                args=(weakref.ref(self), clock, lane, on_thread_end),
                name=f"tidegate-{lane}" if turn == 0 else f"tidegate-{lane}-ahead",
                daemon=True,
            )
            for lane in lanes
            for turn in range(2 if lane in self._ahead else 1)
        ]
        # An executor that nobody holds any more takes its threads along.
        # Not when the interpreter ends: a fork has the lock as it was, perhaps held by a thread that it has not.
        weakref.finalize(self, _wake, clock).atexit = False
        for thread in self._threads:
            thread.start()
        ends_with_process(self)

    @property
    def busy(self) -> bool:
        """A plan was started and not yet finished or cancelled."""
        return self._progress is not None

    @property
    def at_rest(self) -> bool:
        """No op is left to be done, whether or not anybody has waited for it. From any thread."""
        with self._clock.lock:
            return self._progress is None or self._at_rest(self._progress)

    def start(self, plan: Plan) -> None:
        """Hands `plan` to the lanes: ops without a gate begin."""
        with self._clock.lock:
            if self.closed:
                raise EngineError("This optimizer is closed.")
            assert self._progress is None, "one plan at a time"
            self._progress = _Progress(plan, {lane: deque(plan.lanes.get(lane, ())) for lane in self._lanes})
            self._clock.notify()

    def gradient_ready(self, subgroups: Iterable[int]) -> None:
        """Opens the gate `gradient` of these subgroups."""
        with self._clock.lock:
            if self._progress is not None:
                self._progress.gradients.update(subgroups)
                self._clock.notify()

    def done_early(self) -> tuple[Op, ...]:
        """GRAD_D2H ops that were issued so far: the candidates for `step(repeat=…)`. No such op is running after this
        returns unless its gate opens meanwhile."""
        with self._clock.lock:
            progress = self._current()
            return tuple(
                op for op in progress.plan.of_kind(OpKind.GRAD_D2H)
                if op.id in progress.issued or self._running({op.id})
            )  # fmt: skip

    def step(self, repeat: Collection[int] = ()) -> None:
        """Opens all gates. Ops in `repeat` copied gradients that have changed since: they run again, first."""
        with self._clock.lock:
            progress = self._current()
            self._wait(progress, lambda: progress.error is not None or not self._running(repeat))
            for op_id in sorted(repeat, reverse=True):
                op = progress.plan.by_id[op_id]
                if progress.issued.pop(op_id, None) is not None:
                    progress.pending[op.lane].appendleft(op)
                    progress.recopying.add(op.subgroup)
            progress.stepping = True
            self._clock.notify()

    def decided(self) -> bool:
        """After `step`: waits until NORM has said whether there is anything to update. Raises what a lane raised."""
        with self._clock.lock:
            norms = [op.id for op in self._current().plan.of_kind(OpKind.NORM)]
        self.issued(norms)
        return not self._current().skipped

    def issued(self, ops: Collection[int]) -> list[Event]:
        """After `step`: waits until these ops were handed to their lanes; their events. None when the step is skipped.

        Raises what a lane raised.
        """
        with self._clock.lock:
            progress = self._current()
            self._wait(progress, lambda: self._at_rest(progress) or all(op in progress.issued for op in ops))
            if progress.error is not None:
                raise progress.error
            return [progress.issued[op].event for op in ops if op in progress.issued]

    def hand_over(self, lanes: Collection[str]) -> None:
        """Waits until these lanes have handed over what they may hand over now."""
        with self._clock.lock:
            progress = self._current()
            self._wait(progress, lambda: not any(lane in progress.running or self._next(lane) for lane in lanes))

    def finish(self) -> tuple[tuple[Span, ...], bool]:
        """Waits for the last op. Returns the spans on the clock's time, and whether the step was skipped.

        Spans of a lane never overlap. Where it runs ahead, the last blocks of an op and the first ones of the next are
        moved at once: this time is in the span of the earlier one.

        Raises what a lane raised, or LaneStuckError naming lane and op when one op takes longer than the watchdog's
        time: the executor is then `stuck`, and can only be closed.
        """
        with self._clock.lock:
            progress = self._current()
            self._wait(progress, lambda: self._at_rest(progress))
            self._progress = None
        if progress.error is not None:
            _come_to_rest(progress)
            raise progress.error
        return tuple(self._spans(progress)), progress.skipped

    def cancel(self) -> tuple[Span, ...]:
        """Drops what has not begun, waits for what has, and returns the spans of what ran. Only before `step`."""
        with self._clock.lock:
            progress = self._progress
            if progress is None:
                return ()
            _drop(progress)
            self._wait(progress, lambda: not progress.running)
            self._progress = None
        return tuple(self._spans(progress))

    def close(self) -> None:
        """Ends the lane threads, but for one that is stuck. Idempotent."""
        if not self.closed:
            close_all(*(() if self.stuck else (self.cancel,)), self._end_threads)

    def _end_threads(self) -> None:
        with self._clock.lock:
            self.closed = True
            self._clock.notify()
        if self._on_thread_end is None:
            for thread in self._threads:
                thread.join(timeout=0.1 if self.stuck else 5.0)

    def end_with_process(self, deadline: float) -> None:
        """See `process_end`. What is running may take LONGEST_WAIT_SECONDS more; whoever asks for an update that was
        not finished gets EngineError."""
        if self.closed or self.stuck or self._on_thread_end is not None or os.getpid() != self._pid:
            return
        with self._clock.lock:
            progress = self._progress
            if progress is not None:
                if progress.stepping:
                    self._clock.wait_for(lambda: self._at_rest(progress), deadline - time.monotonic())
                if any(progress.pending.values()):
                    _drop(progress)
                    progress.error = progress.error or EngineError("The process ends, and the update was not finished.")
            self.closed = True
            self._clock.notify()
        latest = max(deadline, time.monotonic()) + LONGEST_WAIT_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, latest - time.monotonic()))

    def _wait(self, progress: _Progress, predicate: Callable[[], bool]) -> None:
        while not self._clock.wait_for(predicate, timeout=1.0):
            self._check_watchdog(progress)

    def _current(self) -> _Progress:
        assert self._progress is not None, "no plan was started"
        return self._progress

    def _running(self, ids: Collection[int]) -> bool:
        return any(one.op.id in ids for running in self._current().running.values() for one in running)

    def _at_rest(self, progress: _Progress) -> bool:
        return not progress.running and (progress.error is not None or not any(progress.pending.values()))

    def _check_watchdog(self, progress: _Progress) -> None:
        now = self._clock.now()
        # In each lane whatever comes after the first op may wait for it, and lanes may wait for each other's locks.
        first = min((running[0] for running in progress.running.values()), key=lambda one: one.since, default=None)
        if first is not None and now - first.since > self._watchdog_seconds:
            self.stuck = True
            raise LaneStuckError(
                f"Lane {first.op.lane} is stuck: {first.op.name} runs for {now - first.since:.0f} s "
                f"(watchdog_seconds={self._watchdog_seconds:g})."
            )

    def _take(self, lane: str) -> tuple[_Progress, _Running, list[Event]]:
        """The lane's next op, now running, and the events that it must wait for. With the lock held."""
        progress = self._current()
        op = progress.pending[lane].popleft()
        waits = [progress.issued[dep].event for dep in op.deps]
        if op.kind is OpKind.CPU_UPDATE and op.subgroup in progress.recopied:
            waits.append(progress.recopied[op.subgroup])
        taken = _Running(op, self._clock.now())
        progress.running.setdefault(lane, deque()).append(taken)
        return progress, taken, waits

    def _next(self, lane: str) -> Op | None:
        progress = self._progress
        if progress is None or progress.error is not None or not progress.pending[lane]:
            return None
        if lane in progress.running and not progress.running[lane][-1].begun:
            return None
        op = progress.pending[lane][0]
        return op if progress.may_run(op) else None

    def _run(self, progress: _Progress, taken: _Running, waits: list[Event]) -> None:
        op = taken.op
        issued: Issued | None = None
        error: BaseException | None = None
        try:
            for event in waits:
                self._runner.wait(op.lane, event)
            issued = self._runner.run(op, lambda: self._begun(taken))
        except BaseException as raised:
            error = raised
        with self._clock.lock:
            self._end(progress, taken)
            if issued is not None:
                progress.issued[op.id] = issued
                if op.kind is OpKind.GRAD_D2H and op.subgroup in progress.recopying:
                    progress.recopying.discard(op.subgroup)
                    progress.recopied[op.subgroup] = issued.event
                progress.history.append((op, issued))
            elif isinstance(error, StepSkipped):
                progress.skipped = True
                _drop(progress)
            else:
                progress.error = progress.error or error
            self._clock.notify()

    def _begun(self, taken: _Running) -> None:
        if taken.op.lane in self._ahead:
            with self._clock.lock:
                taken.begun = True
                self._clock.notify()

    def _end(self, progress: _Progress, taken: _Running) -> None:
        """Takes it off its lane, when it is the first there. With the lock held."""
        lane = taken.op.lane
        running = progress.running[lane]
        if running[0] is not taken:
            self._clock.wait_for(lambda: running[0] is taken)
        running.popleft()
        if running:
            running[0].since = self._clock.now()
        else:
            del progress.running[lane]

    def _spans(self, progress: _Progress) -> Iterator[Span]:
        """In the order in which ops ended."""
        lane_ends: dict[str, float] = {}
        for op, issued in progress.history:
            issued.event.wait()
            start, end = issued.event.span()
            if op.lane in self._ahead:
                start = max(start, lane_ends.get(op.lane, start))
                end = lane_ends[op.lane] = max(start, end)
            yield Span(
                op=op.id, kind=op.kind, lane=op.lane, subgroup=op.subgroup, start=start, end=end,
                nbytes=issued.nbytes, numel=issued.numel, content=op.content, slot=op.slot,
            )  # fmt: skip


def _serve(executor_ref: weakref.ref[Executor], clock: Clock, lane: str, on_end: Callable[[], None] | None) -> None:
    """A lane's thread. It holds the executor only while an op runs, so that one that is dropped can be collected."""
    try:
        while True:
            with clock.lock:
                clock.wait_for(lambda: _is_due(executor_ref, lane))
                executor = executor_ref()
                if executor is None:
                    return
                taken = None if executor.closed else executor._take(lane)
            if taken is not None:
                executor._run(*taken)
            held, closed = [executor, taken], taken is None
            del executor, taken
            let_go(held)
            if closed:
                return
    finally:
        if on_end is not None:
            on_end()


def _is_due(executor_ref: weakref.ref[Executor], lane: str) -> bool:
    executor = executor_ref()
    return executor is None or executor.closed or executor._next(lane) is not None


def _wake(clock: Clock) -> None:
    with clock.lock:
        clock.notify()


def _drop(progress: _Progress) -> None:
    for queue in progress.pending.values():
        queue.clear()


def _come_to_rest(progress: _Progress) -> None:
    """After a failure: what was enqueued still works on memory that others are about to get. It may fail, too."""
    for _, issued in progress.history:
        with suppress(Exception):
            issued.event.wait()
