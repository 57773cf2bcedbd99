"""Prepares ops of a plan so that lanes run them without the interpreter: copies of the emulated device, updates on the
CPU, and transfers of state from and to files.

Ops are prepared in the training thread: those that may run before `step()` when the plan starts, and the others in
`step()`, while the gradient norm is computed. The op runner runs all other ops, and ops that have begun before they are
prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Final

from tidegate.agent.devices.base import Device
from tidegate.agent.engine.memory import StateMemory
from tidegate.agent.engine.op_runner import MemoryRunner
from tidegate.agent.engine.plan_execution import IssuedOp, PreparedOp
from tidegate.agent.tiers.prepared_transfer import PreparedTransfer
from tidegate.kernels import ThreadPool
from tidegate.kernels.arithmetic.implementation import Implementation
from tidegate.kernels.dispatch import TransferTask
from tidegate.plan.ops import Op, OpKind
from tidegate.plan.plan import Plan

BEFORE_STEP: Final = (OpKind.FETCH, OpKind.STATE_H2D, OpKind.WEIGHT_D2H)
IN_STEP: Final = (OpKind.GRAD_H2D, OpKind.CPU_UPDATE, OpKind.WEIGHT_H2D, OpKind.STATE_D2H, OpKind.FLUSH)
FIRST_BATCH: Final = 12
"""Number of ops that are prepared before the step begins: what lanes need at once."""
BATCH: Final = 48
"""Number of ops that are prepared together after that, before lanes get them."""


class OpPreparer:
    """Prepares the ops of one optimizer."""

    def __init__(
        self, device: Device, memory: StateMemory, runner: MemoryRunner, pool: ThreadPool, rule: Implementation
    ) -> None:
        self._device = device
        self._memory = memory
        self._runner = runner
        self._pool = pool
        self._rule = rule
        self._flushes: dict[int, Op] = {}
        """The flush of each subgroup in the present plan."""
        self._prepared_early: dict[int, PreparedOp | None] = {}
        """Flushes that were prepared with the update before them, by id."""

    def before_step(self, plan: Plan) -> dict[int, PreparedOp]:
        """The ops that may run before `step()`, by id."""
        return self._prepared(plan.of_kind(*BEFORE_STEP))

    def in_step(self, plan: Plan) -> Iterator[dict[int, PreparedOp]]:
        """The ops that run after `step()`, by id, in batches in the order of the plan: lanes can run the first ones
        while others are prepared. There is at least one batch, and the first one is small. To be called when the
        outcome of the step is known to the op runner."""
        ops = plan.of_kind(*IN_STEP)
        self._flushes = {op.subgroup: op for op in plan.of_kind(OpKind.FLUSH)}
        self._prepared_early.clear()
        yield self._prepared(islice(ops, FIRST_BATCH))
        while batch := tuple(islice(ops, BATCH)):
            yield self._prepared(batch)

    def _prepared(self, ops: Iterable[Op]) -> dict[int, PreparedOp]:
        found = ((op.id, self._prepare(op)) for op in ops)
        return {op: prepared for op, prepared in found if prepared is not None}

    def _prepare(self, op: Op) -> PreparedOp | None:
        match op.kind:
            case OpKind.CPU_UPDATE:
                return self._update(op)
            case OpKind.FETCH:
                return self._transfer(op)
            case OpKind.FLUSH:
                return self._prepared_early.pop(op.id) if op.id in self._prepared_early else self._transfer(op)
        task = self._device.copy_task(op.lane, partial(self._runner.copies, op))
        return None if task is None else PreparedOp(task, op.nbytes)

    def _update(self, op: Op) -> PreparedOp | None:
        if self._rule.task is None:
            return None
        runs = self._runner.runs_on_cpu(op, grad_scale=1.0)
        task = self._rule.task(self._pool, runs, self._runner.factor, self._flush_after(op))
        return PreparedOp(task, numel=sum(run.numel for run in runs))

    def _flush_after(self, update: Op) -> TransferTask | None:
        """Prepares the flush of the state that `update` writes, so that the update can make the checksums. None if
        there is no such flush, or it cannot be prepared."""
        flush = self._flushes.get(update.subgroup)
        if flush is None or flush.host_state != update.host_state:
            return None
        prepared = self._prepared_early[flush.id] = self._transfer(flush)
        return prepared.task if prepared is not None and isinstance(prepared.task, TransferTask) else None

    def _transfer(self, op: Op) -> PreparedOp | None:
        store, path = self._memory.store, op.path
        assert store is not None, "only engines with paths plan these"
        assert path is not None, "the planner names the path"
        prepare = store.prepare_fetch if op.kind is OpKind.FETCH else store.prepare_flush
        transfer = prepare(path, op.subgroup, self._memory.on_host(op.host_state))
        if transfer is None:
            return None
        again = partial(self._again, op, transfer)
        return PreparedOp(transfer.task, op.nbytes, completed=transfer.completed, again=again)

    def _again(self, op: Op, transfer: PreparedTransfer, begun: Callable[[], None]) -> IssuedOp:
        return self._runner.transfer(op, begun, transfer)
