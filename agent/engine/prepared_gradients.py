"""Prepares the ops that read gradients (copies to the host, and sums of squares), so that lanes run them without the
interpreter. Only a device that computes with host threads, as the emulated device does, has tasks for these ops.

In gradient mode `release`, these ops are prepared when the gradients of their subgroup have arrived. In mode `keep`, a
gradient may change until `step()`: copies that have not begun by then are prepared in `step()`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from functools import partial

from tidegate.agent.devices.base import Device, DoneEvent
from tidegate.agent.engine.memory import StateMemory
from tidegate.agent.engine.op_runner import MemoryRunner, SquareSums
from tidegate.agent.engine.plan_execution import PreparedOp
from tidegate.agent.gradients.gradients import Gradients, GradientsRead, grad_ref_of
from tidegate.kernels.dispatch import SquaresTask
from tidegate.plan.ops import Op, OpKind
from tidegate.plan.plan import Plan


class GradientOpPreparer:
    """Prepares the ops of one optimizer that read gradients."""

    def __init__(self, device: Device, memory: StateMemory, runner: MemoryRunner, gradients: Gradients) -> None:
        self._device, self._memory, self._runner, self._gradients = device, memory, runner, gradients
        self.has_tasks = device.norms_task(lambda: ()) is not None
        """Whether the device has tasks for such ops."""
        self._waiting: dict[int, list[Op]] = {}
        """The ops of the present plan that read gradients and are not prepared, by subgroup."""

    def begin_plan(self, plan: Plan) -> None:
        """Takes the ops of a new plan, before the plan is started."""
        self._waiting.clear()
        if not self.has_tasks:
            return
        for op in plan.of_kind(OpKind.GRAD_D2H, OpKind.GRAD_NORM):
            self._waiting.setdefault(op.subgroup, []).append(op)

    def arrived(self, subgroups: Iterable[int]) -> dict[int, PreparedOp]:
        """The ops that read the gradients of these subgroups, by id. To be called in mode `release`, when the gradients
        have arrived, before the ops can begin."""
        return self._prepared(op for subgroup in subgroups for op in self._waiting.pop(subgroup, ()))

    def in_step(self, begun: Callable[[], Collection[Op]]) -> dict[int, PreparedOp]:
        """The copies of gradients to the host that are not prepared yet, by id, without those that have begun. To be
        called in `step()`, when gradients do not change any more. Some of these copies may begin meanwhile.

        begun: returns the copies that have begun; it is called only if copies are left.
        """
        left = [op for ops in self._waiting.values() for op in ops if op.kind is OpKind.GRAD_D2H]
        self._waiting.clear()
        if not left:
            return {}
        already = {op.id for op in begun()}
        return self._prepared(op for op in left if op.id not in already)

    def _prepared(self, ops: Iterable[Op]) -> dict[int, PreparedOp]:
        found = ((op.id, self._copy(op) if op.kind is OpKind.GRAD_D2H else self._squares(op)) for op in ops)
        return {op: prepared for op, prepared in found if prepared is not None}

    def _copy(self, op: Op) -> PreparedOp | None:
        layout = self._memory.layouts[op.subgroup]
        taken = self._gradients.records_of(layout)
        task = self._device.copy_task(op.lane, partial(self._runner.gradient_copies, op, taken))
        if task is None:
            return None
        numel = sum(s.numel for s, arrived in zip(layout.segments, taken, strict=True) if arrived is not None)
        return PreparedOp(task, numel * layout.format.grad_bytes, completed=self._reads(op, taken))

    def _squares(self, op: Op) -> PreparedOp | None:
        taken = self._gradients.records_of(self._memory.layouts[op.subgroup])
        begun_here = self._runner.gradients_that_begin(op, taken)
        task = self._device.norms_task(lambda: [grad_ref_of(arrived) for _, arrived in begun_here])
        if task is None:
            return None
        ready = _TaskSums(task)
        params = [param for param, _ in begun_here]
        self._runner.squares[op.id] = SquareSums(params, [None] * len(params), ready, ready.sums)
        numel = sum(arrived.dense.numel() for _, arrived in begun_here)
        return PreparedOp(task, numel=numel, completed=self._reads(op, taken))

    def _reads(self, op: Op, taken: GradientsRead) -> Callable[[], None]:
        """Keeps these gradients in memory while the task of `op` reads them. Returns the function to call when the
        task has ended."""
        self._runner.reading[op.id] = taken
        return partial(self._was_read, op)

    def _was_read(self, op: Op) -> None:
        """Records that the task of `op` has read its gradients. Does nothing if that was recorded before: a signal
        handler that raises may have cut the first call short, and gradients then stay until the plan ends."""
        taken, now = self._runner.reading.pop(op.id, None), time.monotonic()
        if taken is None:
            return
        self._gradients.was_read(self._memory.layouts[op.subgroup], taken, op.lane, DoneEvent(now, now))


class _TaskSums:
    """The sums of a task, as `SquareSums` needs them. `wait` only copies them to `sums`: the op NORM, which calls it,
    begins after the task has ended."""

    def __init__(self, task: SquaresTask) -> None:
        self._task = task
        self.sums: list[tuple[float, int]] = []

    def wait(self) -> None:
        self.sums[:] = self._task.sums
