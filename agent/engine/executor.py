"""Executes a plan: each lane runs its ops in order, and each op begins when its dependencies are issued (done, or
enqueued on the device) and its gate is open. The gate `gradient` of a subgroup opens when its gradients have arrived,
the gate `step` when `step()` is called.

A lane has one thread. A lane that runs ahead (a lane of a storage path) has two threads, which take turns: while one
thread waits for its op, the other issues the next op, if the dependencies of that op allow it. So the queue of a disk
is not empty while a Python thread waits for a core. Ops of such a lane begin in order and end in order: an op that is
done early counts as running until all ops before it are done, too. Any other order between these ops must be a
dependency in the plan.

Before the gate `step` opens, ops only copy into buffers that nothing else reads yet. So these ops can be repeated (when
a gradient has changed after its copy) or dropped (`cancel`) without harm.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Protocol

from tidegate.agent.cleanup import close_all
from tidegate.agent.devices.base import Event
from tidegate.agent.engine.clock import ExecutorClock
from tidegate.agent.engine.interpreter_exit import stop_at_exit
from tidegate.agent.engine.last_references import LONGEST_WAIT_SECONDS, release_unless_exiting
from tidegate.agent.engine.plan_progress import IssuedOp, PlanProgress, RunningOp
from tidegate.errors import EngineError, LaneStuckError
from tidegate.plan.ops import LANES, Op, OpKind
from tidegate.plan.plan import Plan
from tidegate.timeline.timeline import Span


class StepSkipped(Exception):
    """Raised by the op runner in the op NORM if the step must be skipped, for example because gradients are not finite.
    The executor then drops the rest of the plan."""


class OpRunner(Protocol):
    """Interface of an object that carries out the ops of a plan. `wait` makes a lane wait for an event; `run` enqueues
    an op on its lane.

    On a lane that runs ahead, `run` calls `begun` to let the next op begin. It must not call `begun` before all work of
    its own op is queued.
    """

    def wait(self, lane: str, event: Event) -> None: ...

    def run(self, op: Op, begun: Callable[[], None]) -> IssuedOp: ...


class Executor:
    """Runs one plan at a time on lane threads that exist until `close`. Threads must not call `start`, `step`, `finish`
    and `cancel` at the same time."""

    def __init__(
        self,
        runner: OpRunner,
        clock: ExecutorClock,
        *,
        lanes: Sequence[str] = LANES,
        ahead: Collection[str] = (),
        watchdog_seconds: float = 120.0,
        on_thread_end: Callable[[], None] | None = None,
    ) -> None:
        """lanes: all lanes that plans may have.
        ahead: the lanes that run ahead: they may begin an op before their previous op has ended.
        watchdog_seconds: longest duration of an op; if an op takes longer, LaneStuckError is raised.
        on_thread_end: function that each lane thread calls when it ends. If it is given, `close` does not wait for the
            threads.
        """
        self._runner = runner
        self._clock = clock
        self._lanes = tuple(lanes)
        self._ahead = frozenset(ahead)
        self._watchdog_seconds = watchdog_seconds
        self._on_thread_end = on_thread_end
        self._progress: PlanProgress | None = None
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
        # When the executor is collected, this wakes its threads, which then end.
        # Not at interpreter exit: in a forked child, a thread that the child does not have may hold the lock.
        weakref.finalize(self, _wake, clock).atexit = False
        for thread in self._threads:
            thread.start()
        stop_at_exit(self)

    @property
    def busy(self) -> bool:
        """Whether a plan is in progress: it was started, and neither `finish` nor `cancel` has returned."""
        return self._progress is not None

    @property
    def all_ops_done(self) -> bool:
        """Whether no op of the plan is left to run, even if `finish` was not called yet; True if there is no plan. May
        be called from any thread."""
        with self._clock.lock:
            return self._progress is None or self._progress.is_done

    def start(self, plan: Plan) -> None:
        """Starts `plan`. Ops without a gate may begin at once; the others wait for a gradient or for `step`. Raises
        EngineError if this executor is closed."""
        with self._clock.lock:
            if self.closed:
                raise EngineError("This optimizer is closed: build a new one.")
            assert self._progress is None, "one plan at a time"
            self._progress = PlanProgress(plan, {lane: deque(plan.lanes.get(lane, ())) for lane in self._lanes})
            self._clock.notify()

    def gradient_ready(self, subgroups: Iterable[int]) -> None:
        """Opens the gate `gradient` of these subgroups: ops that wait for their gradients may begin. Does nothing
        without a plan."""
        with self._clock.lock:
            if self._progress is not None:
                self._progress.gradients.update(subgroups)
                self._clock.notify()

    def done_early(self) -> tuple[Op, ...]:
        """The GRAD_D2H ops (copies of gradients to the host) that were issued or have begun so far. Only these ops can
        be repeated with `step(repeat=…)`; an op that begins later copies the gradients as they are then."""
        with self._clock.lock:
            progress = self._current()
            return tuple(
                op for op in progress.plan.of_kind(OpKind.GRAD_D2H)
                if op.id in progress.issued or progress.is_any_running({op.id})
            )  # fmt: skip

    def step(self, repeat: Collection[int] = ()) -> None:
        """Opens all gates: no op waits for a gradient or for this call any more. `repeat`: ids of gradient copies whose
        gradient has changed since the copy; these ops run again, before the other ops of their lane."""
        with self._clock.lock:
            progress = self._current()
            self._wait(progress, lambda: progress.error is not None or not progress.is_any_running(repeat))
            for op_id in sorted(repeat, reverse=True):
                op = progress.plan.by_id[op_id]
                if progress.issued.pop(op_id, None) is not None:
                    progress.pending[op.lane].appendleft(op)
                    progress.recopying.add(op.subgroup)
            progress.stepping = True
            self._clock.notify()

    def wait_for_norm(self) -> bool:
        """Waits until the op NORM has computed the gradient norm; to be called after `step`. Returns False if the step
        is skipped. Raises the error of a lane that has failed."""
        with self._clock.lock:
            norms = [op.id for op in self._current().plan.of_kind(OpKind.NORM)]
        self.wait_until_issued(norms)
        return not self._current().skipped

    def wait_until_issued(self, ops: Collection[int]) -> list[Event]:
        """Waits until the ops with these ids are issued, and returns their events; to be called after `step`. If the
        step is skipped, ops that were dropped have no event in the list. Raises the error of a lane that has failed."""
        with self._clock.lock:
            progress = self._current()
            self._wait(progress, lambda: progress.is_done or all(op in progress.issued for op in ops))
            if progress.error is not None:
                raise progress.error
            return [progress.issued[op].event for op in ops if op in progress.issued]

    def wait_until_ready_ops_issued(self, lanes: Collection[str]) -> None:
        """Waits until these lanes have issued all ops whose dependencies and gates allow it now."""
        with self._clock.lock:
            progress = self._current()
            self._wait(progress, lambda: not any(lane in progress.running or self._next(lane) for lane in lanes))

    def finish(self) -> tuple[tuple[Span, ...], bool]:
        """Waits for the last op. Returns the spans, in seconds of the clock, and whether the step was skipped.

        Spans of a lane never overlap. On a lane that runs ahead, the last blocks of an op and the first blocks of the
        next op are moved at the same time: this time is in the span of the earlier op.

        Raises the error of a lane that has failed. Raises LaneStuckError, with lane and op, if an op takes longer than
        `watchdog_seconds`; the executor is then `stuck`, and can only be closed.
        """
        with self._clock.lock:
            progress = self._current()
            self._wait(progress, lambda: progress.is_done)
            self._progress = None
        if progress.error is not None:
            _wait_after_failure(progress)
            raise progress.error
        return tuple(self._spans(progress)), progress.skipped

    def cancel(self) -> tuple[Span, ...]:
        """Drops the ops that have not begun, waits for the ops in progress, and returns the spans of all ops that ran.
        After `step`, only to be called when the plan has failed or the executor is closed."""
        with self._clock.lock:
            progress = self._progress
            if progress is None:
                return ()
            progress.drop_pending()
            self._wait(progress, lambda: not progress.running)
            self._progress = None
        return tuple(self._spans(progress))

    def close(self) -> None:
        """Ends the lane threads, except for a thread that is stuck. Idempotent."""
        if not self.closed:
            close_all(*(() if self.stuck else (self.cancel,)), self._end_threads)

    def _end_threads(self) -> None:
        with self._clock.lock:
            self.closed = True
            self._clock.notify()
        if self._on_thread_end is None:
            for thread in self._threads:
                thread.join(timeout=0.1 if self.stuck else 5.0)

    def stop_before_exit(self, deadline: float) -> None:
        """Finishes the update and ends the lane threads before the interpreter exits (see `interpreter_exit`).

        deadline: in seconds on the monotonic clock. Ops that are running then get LONGEST_WAIT_SECONDS more, and all
        others are dropped. If the update was not finished, waiting for it raises EngineError.
        """
        if self.closed or self.stuck or self._on_thread_end is not None or os.getpid() != self._pid:
            return
        with self._clock.lock:
            progress = self._progress
            if progress is not None:
                if progress.stepping:
                    self._clock.wait_for(lambda: progress.is_done, deadline - time.monotonic())
                if any(progress.pending.values()):
                    progress.drop_pending()
                    progress.error = progress.error or EngineError("The process ends, and the update was not finished.")
            self.closed = True
            self._clock.notify()
        latest = max(deadline, time.monotonic()) + LONGEST_WAIT_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, latest - time.monotonic()))

    def _wait(self, progress: PlanProgress, predicate: Callable[[], bool]) -> None:
        while not self._clock.wait_for(predicate, timeout=1.0):
            self._check_watchdog(progress)

    def _current(self) -> PlanProgress:
        assert self._progress is not None, "no plan was started"
        return self._progress

    def _check_watchdog(self, progress: PlanProgress) -> None:
        now = self._clock.now()
        # Only the oldest op counts: later ops of its lane may wait for it, and lanes may wait for each other's locks.
        first = min((running[0] for running in progress.running.values()), key=lambda op: op.since, default=None)
        if first is not None and now - first.since > self._watchdog_seconds:
            self.stuck = True
            raise LaneStuckError(
                f"Lane {first.op.lane} is stuck: {first.op.name} has been running for {now - first.since:.0f} s "
                f"(watchdog_seconds={self._watchdog_seconds:g}). Check the device or path of this lane; if it is only "
                "slow, raise watchdog_seconds."
            )

    def _take(self, lane: str) -> tuple[PlanProgress, RunningOp, list[Event]]:
        """Begins the next op of the lane. Returns the progress of the plan, the op, and the events that the lane must
        wait for before the op. The caller must hold the lock."""
        progress = self._current()
        op = progress.pending[lane].popleft()
        waits = [progress.issued[dep].event for dep in op.deps]
        if op.kind is OpKind.CPU_UPDATE and op.subgroup in progress.recopied:
            waits.append(progress.recopied[op.subgroup])
        taken = RunningOp(op, self._clock.now())
        progress.running.setdefault(lane, deque()).append(taken)
        return progress, taken, waits

    def _next(self, lane: str) -> Op | None:
        """The op that the lane may begin now; None if there is none. The caller must hold the lock."""
        progress = self._progress
        if progress is None or progress.error is not None or not progress.pending[lane]:
            return None
        if lane in progress.running and not progress.running[lane][-1].begun:
            return None
        op = progress.pending[lane][0]
        return op if progress.may_run(op) else None

    def _run(self, progress: PlanProgress, taken: RunningOp, waits: list[Event]) -> None:
        op = taken.op
        issued: IssuedOp | None = None
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
                progress.drop_pending()
            else:
                progress.error = progress.error or error
            self._clock.notify()

    def _begun(self, taken: RunningOp) -> None:
        """Called when all work of this op is queued. On a lane that runs ahead, allows the next op to begin."""
        if taken.op.lane in self._ahead:
            with self._clock.lock:
                taken.begun = True
                self._clock.notify()

    def _end(self, progress: PlanProgress, taken: RunningOp) -> None:
        """Waits until all earlier ops of the lane have ended, then removes this op from the running ops. The caller
        must hold the lock."""
        lane = taken.op.lane
        running = progress.running[lane]
        if running[0] is not taken:
            self._clock.wait_for(lambda: running[0] is taken)
        running.popleft()
        if running:
            running[0].since = self._clock.now()
        else:
            del progress.running[lane]

    def _spans(self, progress: PlanProgress) -> Iterator[Span]:
        """The spans of the ops that ran, in the order in which they ended. Waits for the end of each op."""
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


def _serve(
    executor_ref: weakref.ref[Executor], clock: ExecutorClock, lane: str, on_end: Callable[[], None] | None
) -> None:
    """Main function of a lane thread. It keeps the executor alive only while an op runs, so that an executor which is
    no longer used can be collected."""
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
            release_unless_exiting(held)
            if closed:
                return
    finally:
        if on_end is not None:
            on_end()


def _is_due(executor_ref: weakref.ref[Executor], lane: str) -> bool:
    """Whether the lane thread has an op to run, or must end."""
    executor = executor_ref()
    return executor is None or executor.closed or executor._next(lane) is not None


def _wake(clock: ExecutorClock) -> None:
    with clock.lock:
        clock.notify()


def _wait_after_failure(progress: PlanProgress) -> None:
    """Waits, after an op has failed, for all work that was enqueued: this work still uses memory that will be freed.
    Errors of this work are ignored."""
    for _, issued in progress.history:
        with suppress(Exception):
            issued.event.wait()
