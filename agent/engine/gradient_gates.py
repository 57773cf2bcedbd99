"""Lets ops begin whose gradients have arrived (opens their gates), keeps the order of arrival for the next plan, and
finds host copies of gradients that are out of date because the gradient was changed after the copy."""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.agent.engine.executor import Executor
from tidegate.agent.engine.op_runner import MemoryRunner
from tidegate.agent.gradients.gradients import Gradients
from tidegate.agent.parameters.subgroups import Layout


class GradientGates:
    """The gates `gradient` of the plan in flight: an op that reads gradients of a subgroup begins only when the gate of
    this subgroup is open.

    layouts: the subgroups, in the engine's own list, so that subgroups which the engine adds later are included.
    """

    def __init__(
        self, executor: Executor, runner: MemoryRunner, gradients: Gradients, layouts: Sequence[Layout]
    ) -> None:
        self._executor, self._runner, self._gradients, self._layouts = executor, runner, gradients, layouts
        self._last_order: tuple[int, ...] = ()
        self._arrived: dict[int, None] = {}
        """Subgroups in the order in which their gradients arrived in this step (an ordered set): the next plan expects
        the same order."""

    @property
    def order(self) -> tuple[int, ...] | None:
        """Subgroups in the order in which their gradients arrived in the last step; None if some gradients did not
        arrive."""
        return self._last_order if len(self._last_order) == len(self._layouts) else None

    def begin_plan(self) -> None:
        """Deletes the record of the gradients that have arrived, which is from the last plan."""
        self._arrived.clear()

    def open(self, subgroups: Sequence[int]) -> None:
        """Lets ops begin that wait for the gradients of these subgroups (opens their gates), and records that the
        gradients have arrived, in this order."""
        self._arrived.update(dict.fromkeys(subgroups))
        if subgroups:
            self._executor.gradient_ready(subgroups)

    def stale_copies(self) -> list[int]:
        """Ids of the GRAD_D2H ops (copies of gradients to the host) that ran early and whose gradient has changed
        since. Always empty in mode `release`."""
        return [
            op.id for op in self._executor.done_early()
            if self._runner.copied.get(op.subgroup) != self._gradients.records_of(self._layouts[op.subgroup])
        ] if self._gradients.mode == "keep" else []  # fmt: skip

    def end_step(self) -> None:
        """Stores the order in which gradients have arrived in this step (see `order`): the next plan expects the same
        order."""
        self._last_order = tuple(self._arrived)
