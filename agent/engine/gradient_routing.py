"""Routes gradients to the plan in flight: what happens when autograd has accumulated a gradient, when a collective has
reduced one, and when the device has no memory for the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

import torch

from tidegate.agent.engine.executor import Executor
from tidegate.agent.engine.op_runner import MemoryRunner
from tidegate.agent.engine.plan_in_flight import gradient_reads
from tidegate.agent.engine.prepared_gradients import GradientOpPreparer
from tidegate.agent.gradients.gradients import Gradients
from tidegate.agent.parameters.subgroups import Layout
from tidegate.errors import EngineError
from tidegate.plan import Plan
from tidegate.plan.ops import D2H, DEVICE


@dataclass(eq=False)
class GradientSource:
    """Says where the gradients of the current backward pass and later ones come from. An optimizer has one object of
    this class for all engines that the optimizer builds."""

    accumulating: bool = False
    """Whether the current backward pass is not the last one of its step. In mode `release`, its gradients are then not
    given to a plan: they are added to sums in host memory or, if there are no such sums, stay in `.grad`."""
    collectives: WeakSet[object] = field(default_factory=WeakSet)
    """Objects that give reduced gradients to `GradientRouting.reduced` (see `overlap_ddp`). While there are any, the
    gradients in autograd's hooks are not yet reduced over the ranks, and are not used."""


class GradientRouting:
    """Takes the gradients of one engine, and opens the gates `gradient` of the plan in flight: an op that reads
    gradients of a subgroup begins only when the gate of this subgroup is open."""

    def __init__(
        self,
        executor: Executor,
        runner: MemoryRunner,
        gradients: Gradients,
        layouts: Sequence[Layout],
        source: GradientSource,
        early: bool,
        preparer: GradientOpPreparer,
    ) -> None:
        """`layouts`: the subgroups, in the engine's own list, so that subgroups which the engine adds later are
        included. `early`: whether gradients are final when autograd has accumulated them. `preparer`: prepares the ops
        that read gradients."""
        self._executor, self._runner, self._gradients, self._layouts = executor, runner, gradients, layouts
        self._source, self._early = source, early or gradients.mode == "release"
        self._preparer = preparer
        self._last_order: tuple[int, ...] = ()
        self._arrived: dict[int, None] = {}
        """Subgroups in the order in which their gradients arrived in this step (an ordered set): the next plan expects
        the same order."""

    def require_none_released(self) -> None:
        """Raises EngineError if gradients are released already and exist only in the plan."""
        if self._gradients.any_released:
            raise EngineError(
                "Gradients of this step have been released from .grad and are held only for the update in step(). Call "
                "step() first, or drop them with zero_grad()."
            )

    @property
    def order(self) -> tuple[int, ...] | None:
        """Subgroups in the order in which their gradients arrived in the last step; None if some gradients did not
        arrive."""
        return self._last_order if len(self._last_order) == len(self._layouts) else None

    def begin_plan(self, plan: Plan, room_bytes: int) -> None:
        """Prepares for the gradients of a new plan. `room_bytes`: device memory for released gradients."""
        self._arrived.clear()
        self._preparer.begin_plan(plan)
        self._gradients.expect_reads([self._layouts[subgroup] for subgroup in gradient_reads(plan)], room_bytes)

    def add_to_sum(self, param: int) -> bool:
        """In mode `release`, takes a gradient of a backward pass that is not the last one of its step: adds it to its
        sum in host memory or, if there are no such sums, leaves it in `.grad`. Returns False if the gradient belongs to
        the plan instead."""
        summed = self._source.accumulating and self._gradients.mode == "release"
        if summed:
            self._gradients.add_to_sum(param)
        return summed

    def accumulated(self, param: int) -> None:
        """Records the gradient that autograd has just accumulated for a parameter. If gradients are final at that time,
        opens the gates of the subgroups whose gradients are now complete.

        Does nothing while `GradientSource.collectives` has objects: these give the reduced gradients to `reduced`.
        """
        if not self._source.collectives:
            self.release_read()
            ready = self._gradients.accumulated(param)
            if self._early:
                self._open(ready)

    def release_read(self) -> None:
        """Releases the gradients that tasks have read. A lane that runs a task cannot do this itself, because it does
        not use the interpreter."""
        if self._preparer.has_tasks and self._gradients.mode == "release":
            self._executor.collect()

    def reduced(self, gradients: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Takes gradients that a collective has reduced over the ranks, with the numbers of their parameters, and
        allows their copies. May be called from any thread, after the plan was started."""
        for param, grad in gradients:
            self._open(self._gradients.reduced(param, grad))

    def _open(self, subgroups: Sequence[int]) -> None:
        """Lets ops begin that wait for the gradients of these subgroups (opens their gates), and records that the
        gradients have arrived, in this order."""
        self._arrived.update(dict.fromkeys(subgroups))
        if not subgroups:
            return
        if self._gradients.mode == "release" and (prepared := self._preparer.arrived(subgroups)):
            self._executor.prepare(prepared)
        self._executor.gradient_ready(subgroups)

    def wait_for_memory(self) -> None:
        """If the device has no memory for the next gradient, waits until enough released gradients were read by the
        device. The host enqueues a backward far ahead of the device, and the memory of a gradient is free only when the
        device has read the gradient."""
        memory = self._gradients.memory
        if memory.full:
            self._executor.wait_until_ready_ops_issued((D2H, DEVICE))
            self.release_read()
        while memory.full and memory.wait_for_oldest():
            pass

    def stale_copies(self) -> list[int]:
        """Ids of the GRAD_D2H ops (copies of gradients to the host) that ran early and whose gradient has changed
        since. Always empty in mode `release`."""
        if self._gradients.mode != "keep":
            return []
        copied = self._runner.copied
        early = [op for op in self._executor.done_early() if op.subgroup in copied]
        return [op.id for op in early if copied[op.subgroup] != self._gradients.records_of(self._layouts[op.subgroup])]

    def prepare_copies(self) -> None:
        """Prepares the copies of gradients that have not begun. To be called in `step()`, when gradients do not change
        any more."""
        if copies := self._preparer.in_step(self._executor.done_early):
            self._executor.prepare(copies)

    def end_step(self) -> None:
        """Ends the step. In the next step, gradients are expected in the same order, and each gradient as many times as
        in this step (autograd may accumulate one several times)."""
        self._last_order = tuple(self._arrived)
        self._gradients.step_done()
