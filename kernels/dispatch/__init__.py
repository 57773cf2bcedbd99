"""The native dispatcher, which decides which op each lane of a plan begins next, and the lanes whose threads wait for
it. An op may have a task: native work, which a lane's thread runs without the interpreter lock.

A program is a list of ops (`ProgramOp`) in an order in which each op comes after those on which it depends. Lanes, ops
(by their place in the program) and subgroups are numbers. `run` is the number of one execution of an op.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from tidegate.kernels import ThreadPool, _native
from tidegate.kernels.arithmetic.formats import GradDtype

Dispatcher = _native.Dispatcher
GradientFactor = _native.GradientFactor
Lanes = _native.Lanes
Program = _native.Program
SquaresTask = _native.SquaresTask
Task = _native.Task
TaskList = _native.TaskList
TransferTask = _native.TransferTask
copy_task = _native.copy_task
ProgramOp = tuple[int, int, int, bool, bool, list[int]]
"""One op of a program: its lane, its gate, its subgroup (-1 for none), whether it copies a gradient and may be
repeated, whether it must wait for the repeated copy of its subgroup's gradient, and the ops that must be issued before
it."""


def squares_task(pool: ThreadPool, gradients: Sequence[tuple[int, int, GradDtype]]) -> SquaresTask:
    """A task that computes `tidegate.kernels.sum_of_squares` of each gradient, given as its address, number of elements
    and dtype. When the task has ended, its attribute `sums` has the results, in the same order."""
    return _native.squares_task(pool._native, gradients)


class Gate(IntEnum):
    """What an op waits for, besides its dependencies."""

    NONE = 0
    GRADIENT = 1
    """The gradient of its subgroup, or the step."""
    STEP = 2


class Duty(IntEnum):
    """What a lane's thread must do with an op that it has taken."""

    RUN = 0
    """Run it: it has no task."""
    PERFORM = 1
    """Wait for the executions on which it depends; `Lanes.perform` then runs its task."""
    RETRY = 2
    """Run it: its task has failed."""


class Outcome(IntEnum):
    """How an op ended."""

    ISSUED = 0
    """It is done, or enqueued on the device."""
    SKIP = 1
    """The step must be skipped: the rest of the plan is dropped."""
    FAILED = 2
    """With an error: no further op begins."""


class Until(IntEnum):
    """What `Lanes.wait` waits for."""

    DONE = 0
    """No op is running, and none will begin."""
    IDLE = 1
    """No op is running."""
    ISSUED = 2
    """These ops are issued, or the execution is done."""
    NOT_RUNNING = 3
    """None of these ops is running, or an op has failed."""
    LANES_WAIT = 4
    """These lanes run nothing, and may begin nothing now."""
