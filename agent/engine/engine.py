"""Turns backward passes and `step()` into plans in flight: plans, starts, checks what changed, finishes, commits."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tidegate.agent.devices.base import Device
from tidegate.agent.engine.clock import MonotonicClock
from tidegate.agent.engine.executor import Executor
from tidegate.agent.engine.memory import StateMemory
from tidegate.agent.engine.runner import MemoryRunner, StepInputs
from tidegate.agent.gradients import Gradients
from tidegate.agent.interrupts import Uninterrupted
from tidegate.agent.subgroups import Layout, flat
from tidegate.errors import EngineError, ParameterError
from tidegate.kernels import ThreadPool
from tidegate.knobs import Off
from tidegate.plan import Placement, Plan, Policy, make_plan, place, verify
from tidegate.plan.ops import D2H, DEVICE, H2D
from tidegate.timeline import Span


@dataclass(frozen=True)
class Effective:
    """The knobs as numbers: what the next plan is made from."""

    stride: float | Off
    static_ratio: float


@dataclass(frozen=True)
class StepResult:
    """What one step did. Span times are on the monotonic clock."""

    plan: Plan
    spans: tuple[Span, ...]
    skipped: bool
    grad_norm: float | None
    effective: Effective
    stepped: tuple[int, ...]
    """Parameters that were updated."""


class Engine:
    """One per optimizer. Driven by the training thread (and autograd's, in hooks)."""

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        layouts: Sequence[Layout],
        device: Device,
        *,
        num_slots: int,
        cpu_threads: int,
        policy: Policy = "interleaved",
        early_gradients: bool = True,
        watchdog_seconds: float = 120.0,
    ) -> None:
        self.params, self.layouts, self.device = params, tuple(layouts), device
        self.subgroups = tuple(layout.subgroup() for layout in layouts)
        self.num_slots = num_slots
        self.policy: Policy = policy
        self.effective = Effective("off", 0.0)
        self._early_gradients = early_gradients
        self._pool = ThreadPool(cpu_threads)
        self._forms = [_form(param) for param in params]
        self._dropped: list[Span] = []
        self._adopt_weights()
        self.memory = StateMemory(device, self.layouts, num_slots)
        self.gradients = Gradients(device, params, self.layouts)
        self._runner = MemoryRunner(device, self.memory, self.gradients, params, self._pool)
        self._executor = Executor(self._runner, MonotonicClock(), watchdog_seconds=watchdog_seconds)
        self._weights = [self._weight_stamp(i) for i in range(len(params))]
        self._plans: dict[tuple[Placement, ...], Plan] = {}
        self._order: tuple[int, ...] = ()
        self._arrived: dict[int, None] = {}
        """Subgroups in the order in which their gradients came: the next plan expects the same."""
        self._started_with: Effective | None = None
        self._pid = os.getpid()
        self._broken: str | None = None
        for layout in self.layouts:
            self._reset_weights(layout)

    # ---- a step

    def start(self) -> None:
        """Begins the next step's plan, unless it has begun: admissions and prefetches run, gradients follow."""
        self.require_usable()
        if self._executor.busy:
            return
        self.take_edited_weights()
        placed = place(len(self.layouts), stride=self.effective.stride, static_ratio=self.effective.static_ratio)
        processors, after = [p for p, _ in placed], [r for _, r in placed]
        self.memory.prepare(processors, after)
        plan = self._plan(tuple(
            Placement(processor, self.memory.residence[i], lives, self.memory.mirror_valid[i])
            for i, (processor, lives) in enumerate(placed)
        ))  # fmt: skip
        self._runner.copied.clear()
        self._arrived.clear()
        self._follow_framework()
        self._executor.start(plan)
        self._current, self._started_with = plan, self.effective

    def gradient_accumulated(self, param: int) -> None:
        """Autograd has accumulated into a parameter: its subgroups may be copied early."""
        ready = self.gradients.accumulated(param)
        self.start()
        self._arrived.update(dict.fromkeys(ready))
        if ready and self._early_gradients:
            self._executor.gradient_ready(ready)

    def step(self, inputs: StepInputs) -> StepResult:
        """Runs the update to its end. The inputs' `has_grad`, `grad_norm` and `grad_scale` are filled in."""
        self.gradients.watch_unfrozen()
        self.start()
        self.gradients.refresh()
        if self._edited() or self._started_with != self.effective:
            self.quiesce()
            self.start()
        plan = self._current
        self._runner.inputs = inputs
        self._follow_framework()
        try:
            self._executor.step(repeat=self._stale(plan))
            spans, skipped = self._executor.finish()
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise
        self._runner.inputs = None
        stepped = () if skipped else tuple(i for i, has in enumerate(inputs.has_grad) if has)
        self._finish(plan, skipped, stepped)
        dropped, self._dropped = self._dropped, []
        return StepResult(plan, (*dropped, *spans), skipped, inputs.grad_norm, self.effective, stepped)

    def quiesce(self) -> None:
        """Stops a plan that waits for its `step()`; what it copied so far is dropped, nothing is lost."""
        if os.getpid() == self._pid and not self._executor.stuck:
            with Uninterrupted():
                self._dropped += self._executor.cancel()
                self._runner.copied.clear()

    def _follow_framework(self) -> None:
        """What the device's lanes do from now on comes after what the framework has done to weights and gradients."""
        now = self.device.now()
        for lane in (H2D, D2H, DEVICE):
            self.device.wait(lane, now)

    def _finish(self, plan: Plan, skipped: bool, stepped: Sequence[int]) -> None:
        self._order = tuple(self._arrived)
        self.gradients.step_done()
        self._runner.copied.clear()
        if skipped:
            self._weights = [self._weight_stamp(i) for i in range(len(self.params))]
            return
        self.memory.commit([p.processor for p in plan.placements], [p.after for p in plan.placements])
        for index in stepped:
            torch.autograd.graph.increment_version(self.params[index])
        self._weights = [self._weight_stamp(i) for i in range(len(self.params))]

    def _stale(self, plan: Plan) -> list[int]:
        return [
            op.id for op in self._executor.done_early()
            if self._runner.copied.get(op.subgroup) != self.gradients.take(self.layouts[op.subgroup])
        ]  # fmt: skip

    def _plan(self, placements: tuple[Placement, ...]) -> Plan:
        key = placements
        if key not in self._plans:
            order = self._order if len(self._order) == len(self.layouts) else None
            plan = make_plan(
                self.subgroups, placements, num_slots=self.num_slots, policy=self.policy, grad_on_host_order=order
            )
            verify(plan)
            if len(self._plans) >= 16:
                self._plans.clear()
            self._plans[key] = plan
        return self._plans[key]

    # ---- weights that the user set

    def _weight_stamp(self, param: int) -> tuple[int, int]:
        weight = self.params[param]
        return weight.data_ptr(), weight._version

    def _edited(self) -> list[int]:
        return [i for i, known in enumerate(self._weights) if known != self._weight_stamp(i)]

    def weights_loaded(self) -> None:
        """State is about to be loaded for the weights as they are now: remainders start at 0, mirrors are copied anew,
        and an earlier failure is over."""
        self._adopt_weights()
        self._weights = [self._weight_stamp(i) for i in range(len(self.params))]
        if not self._executor.stuck:
            self._broken = None
        for layout in self.layouts:
            self.memory.mirror_valid[layout.id] = False
            self._reset_weights(layout)

    def take_edited_weights(self) -> None:
        """The weight is authoritative: a mirror is copied anew, remainders of edited parameters start at 0.

        ParameterError when a weight was given another dtype, shape or memory format: its state is in another order.
        """
        edited = set(self._edited())
        if not edited:
            return
        for index in edited:
            if _form(self.params[index]) != self._forms[index]:
                raise ParameterError(
                    f"Parameter {index} had dtype, shape and strides {self._forms[index]} when the optimizer was built "
                    f"and has {_form(self.params[index])} now. Convert the model before building the optimizer."
                )
        self._adopt_weights()
        for layout in self.layouts:
            if any(segment.param in edited for segment in layout.segments):
                self.memory.mirror_valid[layout.id] = False
                self._reset_weights(layout, edited)
        self._weights = [self._weight_stamp(i) for i in range(len(self.params))]

    def _reset_weights(self, layout: Layout, only: set[int] | None = None) -> None:
        if not layout.format.aux_bytes:
            return
        for segment in layout.segments:
            if only is None or segment.param in only:
                weights = flat(self.params[segment.param])[segment.offset : segment.offset + segment.numel]
                self.memory.reset_aux(layout.id, segment.start, weights)

    def _adopt_weights(self) -> None:
        for param in self.params:
            if param.numel():
                self.device.adopt(param)

    # ---- knobs, life

    def check(self, effective: Effective, headroom_bytes: int) -> None:
        """MemoryBudgetError with figures when these knobs do not fit the device."""
        weights = sum(p.numel() * p.element_size() for p in self.params)
        self.memory.check_fits(effective.stride, effective.static_ratio, 2 * weights + headroom_bytes)

    def watch(self, on_gradient: Callable[[int], None]) -> None:
        self.gradients.watch(on_gradient)

    def close(self) -> None:
        """Stops the lanes and gives memory back. The weights stay as they are."""
        if os.getpid() != self._pid:
            return
        self._broken = "it was closed"
        self._executor.close()
        self.gradients.close()
        if self._executor.stuck:
            return  # a lane still works on this memory
        self.memory.close()
        self._pool.close()
        self.device.close()

    def require_usable(self) -> None:
        """EngineError with the reason when this engine cannot step or be read."""
        if os.getpid() != self._pid:
            raise EngineError("This optimizer belongs to the parent process; a forked child cannot step it.")
        if self._broken:
            raise EngineError(
                f"This optimizer is not usable: {self._broken}. "
                "Load weights and state of a checkpoint, or build a new one."
            )


def _form(param: torch.Tensor) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    return str(param.dtype).removeprefix("torch."), tuple(param.shape), param.stride()
