"""Executes a plan: each lane runs its ops in order, and each op begins when its dependencies are issued (done, or
enqueued on the device) and its gate is open. The gate `gradient` of a subgroup opens when its gradients have arrived,
the gate `step` when `step()` is called.

A native state machine (`kernels/src/dispatcher.h`) decides which op a lane begins next. A lane has one thread, which
waits there for its next op without the interpreter lock. It also runs ops that have a task there (`PreparedOp`): so a
lane needs no interpreter while its ops have tasks. A lane that runs ahead (a lane of a storage path) has two
threads, which take turns: while one thread waits for its op, the other issues the next op, if the dependencies of that
op allow it. So the queue of a disk is not empty while a Python thread waits for a core. Ops of such a lane begin in
order and end in order: an op that is done early counts as running until all ops before it are done, too. Any other
order between these ops must be a dependency in the plan.

Before the gate `step` opens, ops only copy into buffers that nothing else reads yet. So these ops can be repeated (when
a gradient has changed after its copy) or dropped (`cancel`) without harm.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, Protocol

from tidegate.agent.cleanup import close_all
from tidegate.agent.devices.base import DoneEvent, Event
from tidegate.agent.engine.interpreter_exit import stop_at_exit
from tidegate.agent.engine.last_references import LONGEST_WAIT_SECONDS, release_unless_exiting
from tidegate.agent.engine.plan_execution import IssuedOp, IssuedRun, PlanExecution, PreparedOp, program_of
from tidegate.agent.engine.watchdog import Watchdog
from tidegate.errors import EngineError, LaneStuckError
from tidegate.kernels.dispatch import Duty, Lanes, Outcome, Program, Until
from tidegate.plan.ops import LANES, Op, OpKind
from tidegate.plan.plan import Plan
from tidegate.timeline.timeline import Span

log = logging.getLogger("tidegate")

POLL_SECONDS: Final = 0.1
"""Interval at which a thread that waits for ops handles signals (Ctrl-C) and checks whether a lane is stuck."""

LANES_TURN_SECONDS: Final = 0.0003
"""Longest time for which the training thread waits for lanes between two batches of ops that it prepares."""

COLLECT_SECONDS: Final = 0.02
"""Interval at which the thread that waits for the end of a plan collects the spans of the ops that have ended: the
lanes do not need the interpreter meanwhile, and little is left to do at the end."""


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
    """Runs one plan at a time on lane threads that exist until `close`. Threads must not call `start`, `step`,
    `collect`, `finish` and `cancel` at the same time."""

    def __init__(
        self,
        runner: OpRunner,
        *,
        lanes: Sequence[str] = LANES,
        ahead: Collection[str] = (),
        watchdog_seconds: float = 120.0,
    ) -> None:
        """lanes: all lanes that plans may have.
        ahead: the lanes that run ahead: they may begin an op before their previous op has ended.
        watchdog_seconds: longest duration of an op; if an op takes longer, LaneStuckError is raised.
        """
        self._runner = runner
        self._names = tuple(lanes)
        self._ahead = frozenset(ahead)
        self._watchdog_seconds = watchdog_seconds
        self._lanes = Lanes([lane in self._ahead for lane in lanes])
        self._execution: PlanExecution | None = None
        self._program: tuple[Plan, Program] | None = None
        """The last plan, and its program: most steps have the plan of the step before."""
        self._pid = os.getpid()
        self.closed = False
        self.stuck = False
        self._stopping: EngineError | None = None
        self._threads = [
            threading.Thread(
                target=_serve,
                args=(weakref.ref(self), self._lanes, number),
                name=f"tidegate-{lane}" if turn == 0 else f"tidegate-{lane}-ahead",
                daemon=True,
            )
            for number, lane in enumerate(lanes)
            for turn in range(2 if lane in self._ahead else 1)
        ]
        self._in_use: list[OpRunner] = []
        """The runner, while there is a plan: its tasks use the runner's memory."""
        # When the executor is collected, its threads end.
        weakref.finalize(self, _end_lanes, self._lanes, self._in_use).atexit = False
        for thread in self._threads:
            thread.start()
        stop_at_exit(self)

    @property
    def busy(self) -> bool:
        """Whether a plan is in progress: it was started, and neither `finish` nor `cancel` has returned."""
        return self._execution is not None

    @property
    def all_ops_done(self) -> bool:
        """Whether no op of the plan is left to run, even if `finish` was not called yet; True if there is no plan. May
        be called from any thread."""
        return self._lanes.is_done

    def start(self, plan: Plan, prepared: Mapping[int, PreparedOp] | None = None) -> None:
        """Starts `plan`. Ops without a gate may begin at once; the others wait for a gradient or for `step`. Raises
        EngineError if this executor is closed.

        prepared: ops that lanes run without the interpreter, by id.
        """
        if self.closed:
            raise EngineError("This optimizer is closed: build a new one.")
        assert self._execution is None, "one plan at a time"
        if self._program is None or self._program[0] is not plan:
            self._program = plan, program_of(plan, self._names)
        self._execution = PlanExecution(plan, self._ahead)
        self._in_use.append(self._runner)
        self._lanes.start(self._program[1], self._execution.prepare(prepared or {}))

    def prepare(self, ops: Mapping[int, PreparedOp]) -> None:
        """Lets lanes run these ops of the plan without the interpreter, by id. Those that have begun are run by the op
        runner."""
        self._lanes.arm(self._current().prepare(ops))

    def gradient_ready(self, subgroups: Iterable[int]) -> None:
        """Opens the gate `gradient` of these subgroups: ops that wait for their gradients may begin. Does nothing
        without a plan."""
        self._lanes.open_gradients(list(subgroups))

    def done_early(self) -> tuple[Op, ...]:
        """The GRAD_D2H ops (copies of gradients to the host) that were issued or have begun so far. Only these ops can
        be repeated with `step(repeat=…)`; an op that begins later copies the gradients as they are then."""
        execution = self._current()
        copies = execution.plan.of_kind(OpKind.GRAD_D2H)
        return tuple(op for op in copies if self._lanes.is_begun(execution.plan.places[op.id]))

    def step(self, repeat: Collection[int] = ()) -> None:
        """Opens all gates: no op waits for a gradient or for this call any more. `repeat`: ids of gradient copies whose
        gradient has changed since the copy; these ops run again, before the other ops of their lane."""
        again = self._current().places_of(repeat)
        self._wait(Until.NOT_RUNNING, again)
        self._lanes.step(again)

    def let_lanes_run(self, prepared: Collection[int] = ()) -> None:
        """Waits until lanes have issued the op NORM and the ops that were just prepared, but at most
        LANES_TURN_SECONDS. Meanwhile the lane of NORM can take the interpreter lock, which it would otherwise get only
        after 5 ms; all updates wait for NORM. And threads of the CPU update can take the core of this thread, on which
        they would otherwise wait for a slice of 3 ms.

        prepared: ids of the ops of the last batch.
        """
        execution = self._current()
        places = [*execution.plan.norm_places, *execution.places_of(prepared)]
        self._lanes.wait(Until.ISSUED, places, LANES_TURN_SECONDS)

    def wait_for_norm(self) -> bool:
        """Waits until the op NORM has computed the gradient norm; to be called after `step`. Returns False if the step
        is skipped. Raises the error of a lane that has failed."""
        execution = self._current()
        self._wait(Until.ISSUED, execution.plan.norm_places)
        self._raise_failure(execution)
        return not self._lanes.is_skipped

    def wait_until_issued(self, ops: Collection[int]) -> list[Event]:
        """Waits until the ops with these ids are issued, and returns their events; to be called after `step`. If the
        step is skipped, ops that were dropped have no event in the list. Raises the error of a lane that has failed."""
        execution = self._current()
        wanted = execution.places_of(ops)
        self._wait(Until.ISSUED, wanted)
        self._raise_failure(execution)
        last_runs = {one[0]: one for one in self._lanes.issued_from()}
        return [execution.event_of(last_runs[place]) for place in wanted if place in last_runs]

    def wait_until_done(self, ops: Collection[int]) -> None:
        """Waits until the ops with these ids are done; to be called after `step`. Ops that were dropped count as done.
        Raises the error of a lane that has failed, or LaneStuckError."""
        self._wait(Until.ISSUED, self._current().places_of(ops), collects=True)
        for event in self.wait_until_issued(ops):
            event.wait()

    def wait_until_ready_ops_issued(self, lanes: Collection[str]) -> None:
        """Waits until these lanes have issued all ops whose dependencies and gates allow it now."""
        self._wait(Until.LANES_WAIT, [self._names.index(lane) for lane in lanes])

    def finish(self) -> tuple[tuple[Span, ...], bool]:
        """Waits for the last op. Returns the spans, in seconds of the clock, and whether the step was skipped.

        Spans of a lane never overlap. On a lane that runs ahead, the last blocks of an op and the first blocks of the
        next op are moved at the same time: this time is in the span of the earlier op.

        Raises the error of a lane that has failed. Raises LaneStuckError, with lane and op, if an op takes longer than
        `watchdog_seconds`; the executor is then `stuck`, and can only be closed.
        """
        execution = self._current()
        self._wait(Until.DONE, collects=True)
        skipped = self._lanes.is_skipped
        try:
            self._collect(execution)
            self._raise_failure(execution)
        except BaseException:
            _wait_after_failure(execution, self._lanes.issued_from())
            raise
        finally:
            self._forget()
        return execution.all_spans(), skipped

    def cancel(self) -> tuple[Span, ...]:
        """Drops the ops that have not begun, waits for the ops in progress, and returns the spans of all ops that ran.
        After `step`, only to be called when the plan has failed or the executor is closed."""
        execution = self._execution
        if execution is None:
            return ()
        self._lanes.drop()
        self._wait(Until.IDLE)
        self._collect(execution)
        self._forget()
        return execution.all_spans()

    def collect(self) -> None:
        """Records the ops that have ended so far, and calls `completed` of those that were prepared. Does nothing
        without a plan."""
        if self._execution is not None:
            self._collect(self._execution)

    def _collect(self, execution: PlanExecution) -> None:
        execution.collect(self._lanes.issued_from(len(execution.spans)))

    def close(self) -> None:
        """Ends the lane threads, except for a thread that is stuck. Idempotent. If an op still runs afterwards, because
        an exception has cut the wait for it short, the executor is `stuck`: its memory must not be freed."""
        if not self.closed:
            close_all(*(() if self.stuck else (self.cancel,)), self._end_threads)

    def _end_threads(self, latest: float = math.inf) -> None:
        """Ends the lane threads. Waits for each of them 5 s (0.1 s if a lane is stuck), and for none after `latest`, in
        seconds on the monotonic clock. If an op still runs then, or an exception ends the wait early, the memory that
        is in use is never freed."""
        known, self.stuck = self.stuck, True
        longest = 0.1 if known else 5.0
        try:
            self.closed = True
            self._lanes.close()
            for thread in self._threads:
                thread.join(min(longest, max(0.0, latest - time.monotonic())))
            self.stuck = known or self._is_in_use()
        finally:
            if self.stuck:
                _keep_for_ever(self._in_use)
        if self.stuck and not known:
            log.warning("Ops of this optimizer still run: the memory that they use is kept until the process ends.")

    def _is_in_use(self) -> bool:
        """Whether an op still runs, or may still run, and uses the memory of the runner."""
        return any(thread.is_alive() for thread in self._threads) or not self._lanes.wait_for_tasks(0.0)

    def stop_before_exit(self, deadline: float) -> None:
        """Finishes the update and ends the lane threads before the interpreter exits (see `interpreter_exit`).

        deadline: in seconds on the monotonic clock. Ops that are running then get LONGEST_WAIT_SECONDS more, and all
        others are dropped. If the update was not finished, waiting for it raises EngineError.
        """
        if self.closed or os.getpid() != self._pid:
            return
        if not self.stuck:
            if self._lanes.is_stepping:
                self._lanes.wait(Until.DONE, [], max(0.0, deadline - time.monotonic()))
            if self._lanes.has_pending:
                self._stopping = EngineError("The process ends, and the update was not finished.")
                self._lanes.drop()
        self._end_threads(max(deadline, time.monotonic()) + LONGEST_WAIT_SECONDS)

    def _wait(self, until: Until, numbers: Sequence[int] = (), *, collects: bool = False) -> None:
        """Waits for the lanes. With `collects`, collects the spans of ended ops meanwhile. Raises LaneStuckError."""
        execution, watchdog = self._current(), Watchdog(self._watchdog_seconds)
        while not self._lanes.wait(until, list(numbers), COLLECT_SECONDS if collects else POLL_SECONDS):
            self._check_watchdog(execution, watchdog)
            if collects:
                with suppress(Exception):  # raised again by the `_collect` in `finish`, when no op runs
                    self._collect(execution)

    def _current(self) -> PlanExecution:
        assert self._execution is not None, "no plan was started"
        return self._execution

    def _forget(self) -> None:
        self._lanes.forget()
        self._in_use.clear()
        self._execution = None

    def _raise_failure(self, execution: PlanExecution) -> None:
        """Raises the error of the lane that failed first, if one did."""
        failed = self._lanes.failed_run
        error = self._stopping if failed is None else execution.errors[failed]
        if error is not None:
            raise error

    def _check_watchdog(self, execution: PlanExecution, watchdog: Watchdog) -> None:
        oldest = self._lanes.oldest()
        seconds = watchdog.stuck_seconds(math.inf if oldest is None else oldest[1])
        if oldest is not None and seconds is not None:
            op = execution.plan.ops[oldest[0]]
            self.stuck = True
            raise LaneStuckError(
                f"Lane {op.lane} is stuck: {op.name} has been running for {seconds:.0f} s "
                f"(watchdog_seconds={self._watchdog_seconds:g}). Check the device or path of this lane; if it is only "
                "slow, raise watchdog_seconds."
            )

    def _run(self, place: int, run: int, waits: Sequence[int], duty: int) -> None:
        """Runs one op in the lane's thread. run: the number of this execution of the op. waits: the executions for
        whose events the lane must wait. duty: a `Duty`."""
        execution = self._current()
        op, done = execution.plan.ops[place], False
        try:
            for number in waits:
                self._runner.wait(op.lane, execution.runs[number].event)
            if duty == Duty.PERFORM and self._lanes.perform(place, run):
                return
            again = execution.prepared[place].again if duty != Duty.RUN else None
            issued = execution.runs[run] = (again or partial(self._runner.run, op))(lambda: self._lanes.queued(run))
            done = isinstance(issued.event, DoneEvent)
            outcome = Outcome.ISSUED
        except StepSkipped:
            outcome = Outcome.SKIP
        except BaseException as error:
            execution.errors[run] = error
            outcome = Outcome.FAILED
        self._lanes.ended(run, outcome, done)


def _serve(executor_ref: weakref.ref[Executor], lanes: Lanes, lane: int) -> None:
    """Main function of a lane thread. It keeps the executor alive only while an op runs, so that an executor which is
    no longer used can be collected."""
    while (taken := lanes.take(lane)) is not None:
        executor = executor_ref()
        if executor is None:
            return
        executor._run(*taken)
        held = [executor, taken]
        del executor, taken
        release_unless_exiting(held)


def _end_lanes(lanes: Lanes, in_use: list[OpRunner]) -> None:
    """Ends the threads of an executor that was collected. Its memory is freed only when no task uses it any more, and
    never if a task is stuck."""
    lanes.close()
    if not lanes.wait_for_tasks(LONGEST_WAIT_SECONDS):
        _keep_for_ever(in_use)


def _keep_for_ever(runners: Iterable[OpRunner]) -> None:
    """Lets nothing free these op runners, also not the end of the interpreter: a task that is stuck uses their memory,
    and to end its threads would take for ever."""
    for runner in runners:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(runner))


def _wait_after_failure(execution: PlanExecution, issued: Sequence[IssuedRun]) -> None:
    """Waits, after an op has failed, for all work that was enqueued: this work still uses memory that will be freed.
    Errors of this work are ignored."""
    for _, run, _, _ in issued:
        with suppress(Exception):
            if run in execution.runs:  # tasks have ended
                execution.runs[run].event.wait()
