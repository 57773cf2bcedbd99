"""The base class of optimizers whose state is kept by an engine: builds, rebuilds and closes the engine, follows
changes of the parameters, and applies knobs."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn, Self

import torch

from tidegate.agent.checkpoints.optimizer_checkpoints import OptimizerCheckpoints
from tidegate.agent.cleanup import close_all
from tidegate.agent.devices.base import Device
from tidegate.agent.devices.selection import choose_device, warn_if_emulated
from tidegate.agent.engine.engine import Engine
from tidegate.agent.engine.gradient_routing import GradientSource
from tidegate.agent.engine.phases import PhaseRecorder
from tidegate.agent.gradients.accumulation import check_fits
from tidegate.agent.interrupts import DelayInterrupt
from tidegate.agent.optimizer import state_dicts
from tidegate.agent.optimizer.auto_knobs import AutoValues, as_knob_values
from tidegate.agent.optimizer.backward_passes import NO_BACKWARD, BackwardPasses
from tidegate.agent.optimizer.compile_exclusion import exclude_from_compilation
from tidegate.agent.optimizer.engine_builder import build_engine, layouts_of
from tidegate.agent.optimizer.host_cache import automatic_cache_bytes
from tidegate.agent.optimizer.hyperparameters import as_list
from tidegate.agent.optimizer.ineffective_steps import IneffectiveStepWarnings, param_namer
from tidegate.agent.optimizer.listeners import AttachmentListener, OverlapListener
from tidegate.agent.optimizer.offload import Offload, as_offload
from tidegate.agent.optimizer.state_transfer import (
    ParameterMapping,
    check_transferable,
    gather_for_transfer,
    warn_of_removed,
)
from tidegate.agent.optimizer.state_view import OffloadedState
from tidegate.agent.optimizer.step_guard import StepGuard
from tidegate.agent.optimizer.step_results import StepResultQueue
from tidegate.agent.parameters.ownership import claim, release_ownership
from tidegate.agent.parameters.parameter_identity import ParameterRecords, name_of
from tidegate.agent.parameters.shards import GradientNorm, LocalShard, NormOverRanks, shard_of
from tidegate.agent.parameters.subgroups import Layout
from tidegate.errors import CheckpointFailed, ConfigError
from tidegate.kernels.arithmetic.implementation import Implementation
from tidegate.knobs.knobs import Knobs, KnobValue, Off
from tidegate.plan.effective_knobs import EffectiveKnobs

log = logging.getLogger("tidegate")


class OffloadedOptimizer(torch.optim.Optimizer):
    """A torch optimizer with an engine that keeps its state and runs its updates. Its parameters may be moved,
    converted, replaced, added or put into other groups, and its knobs may change, while training runs."""

    _norm_over_ranks: Callable[[Sequence[torch.Tensor]], GradientNorm] = NormOverRanks
    """Class of the object that sums the squares of gradients over ranks. A subclass may set another class."""

    def __init__(
        self, params: Iterable[Any], rule: Implementation, defaults: dict[str, Any], offload: Offload | None
    ) -> None:
        """params, defaults: as in `torch.optim.Optimizer`. Raises the same errors as `AdamW`."""
        self.rule, self._implementation = rule.rule, rule
        super().__init__(as_list(params), defaults)
        exclude_from_compilation()
        self.offload = as_offload(offload)
        self.num_steps = 0
        """Number of calls of `step()` with gradients, continued from a loaded state."""
        self._params: list[torch.nn.Parameter] = [p for group in self.param_groups for p in group["params"]]
        self._steps = [0] * len(self._params)
        self._pid, self._why_closed = os.getpid(), "it was closed"
        check_fits([shard_of(param) for param in self._params], self.offload.accumulation)
        claim(self, self._params)
        self.device = choose_device(self.offload, [shard_of(param) for param in self._params], self._implementation)
        warn_if_emulated(self.device)
        layouts = layouts_of(self.param_groups, self.offload, self.rule)
        self.knobs = self.offload.knobs()
        self.gradient_source = GradientSource()
        self._auto = AutoValues(
            cache_bytes=automatic_cache_bytes(self.offload, list(map(shard_of, self._params)), layouts)
        )
        try:
            self.engine = self._build_engine(self._params, layouts, self.device)
        except BaseException:
            release_ownership(self, self._params)
            raise
        self._param_records = ParameterRecords(self._params)
        self._has_stepped = False
        """Whether there was an update: from then on, parameters may no longer change device, dtype, shape or
        strides."""
        self.phases = PhaseRecorder(self.device.take_peak_bytes)
        self._step_results = StepResultQueue(self.engine, self.phases)
        self._ineffective = IneffectiveStepWarnings(param_namer(self))
        self._ineffective.watch(len(self._params))
        self.observers = self._step_results.observers
        """Functions that are called in the training thread with result and phases of each update: at the end of
        `step()`, or later if the update is still running then."""
        self.observers.append(self._ineffective.observe)
        self.attachment: AttachmentListener | None = None
        self.overlap: OverlapListener | None = None
        self._step_guard, self._backward_passes = StepGuard(), BackwardPasses(self.phases)
        self._moves_checked_in = NO_BACKWARD
        """Id of the last backward pass in which all parameters were checked: whether they were moved, converted or
        replaced. The check is made at the first gradient of each backward pass."""
        self._checkpoints = OptimizerCheckpoints(self.engine, self.phases)
        try:
            self.check_knobs(self.knobs)
            self.apply_knobs(self.knobs)
        except BaseException:
            self.close()
            raise
        self.engine.gradients.watch(self._gradient_arrived)

    def wait(self) -> None:
        """Waits for the end of the update. With `overlap_forward` or deferred flushes, `step()` returns before."""
        with self.phases.exposed():
            self._step_results.wait_for_update()
        self._step_results.deliver(background=True)  # else it was delivered at the end of step()

    @property
    def _in_background(self) -> bool:
        """Whether `step()` returns before its update has ended (see `OverlapListener`)."""
        return self.overlap is not None and self.overlap.in_background

    def _begin_overlap(self, overlap: OverlapListener) -> None:
        """Lets updates run in the background while `overlap.in_background` is True. There may be no other overlap."""
        self.overlap = overlap

    def _end_overlap(self, overlap: OverlapListener) -> None:
        """Ends this overlap after the running update, unless the overlap was ended before."""
        if self.overlap is overlap:
            self.wait()
            self.overlap = None

    # ---- arrival of gradients

    def _backward_began(self, *_: Any) -> None:
        """To be called by hooks inside a backward pass: begins the phase `backward`, until the pass ends."""
        self._backward_passes.began(self.param_groups, self.num_steps)

    def _gradient_arrived(self, param: int) -> None:
        """Tells the engine that `.grad` of the parameter of number `param` was written, and records how long this
        takes. To be called by hooks for each gradient, so that it must be cheap."""
        task = torch._C._current_graph_task_id()
        if task != self._moves_checked_in or self._param_records.was_moved(param):
            self._moves_checked_in = task
            number = self._current_number(param)
            if number is None:
                return
            param = number
        if task != NO_BACKWARD and not self._backward_passes.is_noticed(task):
            self._backward_began()
        began = time.monotonic()
        self.phases.gradient_arrived(began)
        try:
            if self.engine.running:
                self.engine.planner.idle_time.ended()
                self._step_results.wait_for_update()
            self.engine.gradient_accumulated(param)
        finally:
            self.phases.blocked(time.monotonic() - began)

    # ---- knobs

    def check_knobs(self, knobs: Knobs) -> None:
        """Raises MemoryBudgetError or CapacityError, with figures, if the state does not fit with these knobs, and
        KnobError if they name a path that this run does not have. May be called from any thread."""
        self.engine.planner.check(self._effective(knobs), self.offload.headroom_bytes)

    def apply_knobs(self, knobs: Knobs) -> None:
        """Sets the knobs for the next step and later ones. May be called only between steps."""
        self.knobs = knobs
        self.engine.effective = self._effective(knobs)
        self.engine.stage()

    def _set_auto(
        self, *, stride: float | Off | None = None, alternate: bool | None = None, cache_bytes: int | None = None
    ) -> None:
        """Sets the values that `auto` stands for, for the next step and later ones; None leaves a value unchanged.

        stride: the stride. alternate: whether the order of updates alternates. cache_bytes: bytes of the host cache.

        Raises MemoryBudgetError or CapacityError, with nothing changed, if the state does not fit with these values.
        """
        before = self._auto
        self._auto = before.changed(stride, alternate, cache_bytes)
        try:
            self.check_knobs(self.knobs)
        except ConfigError:
            self._auto = before
            raise
        self.apply_knobs(self.knobs)

    def effective_knobs(self) -> dict[str, KnobValue]:
        """The knob values that the engine uses now, with those of storage paths if the run has paths."""
        residences = self.engine.residences
        return as_knob_values(self.engine.effective, None if residences is None else residences.counts)

    def _effective(self, knobs: Knobs) -> EffectiveKnobs:
        return self._auto.effective(knobs, self.offload.policy)

    def _automatic_cache_bytes(self) -> int:
        """Bytes of the host cache when `host_cache` is `auto`, computed from the host memory that is free now or that
        this optimizer uses already."""
        held_bytes = sum(self.engine.memory.host_bytes().values())
        return automatic_cache_bytes(self.offload, self.engine.shards, self.engine.layouts, held_bytes)

    # ---- the state of single parameters

    _state: Any
    """An `OffloadedState`, except while torch packs a state dict: then a plain dictionary of values."""

    @property
    def state(self) -> Any:
        """The state, as in torch: a lazy view of the offloaded state (see `OffloadedState`)."""
        return self._state

    @state.setter
    def state(self, given: Mapping[Any, Any]) -> None:
        if "_state" not in self.__dict__:
            self._state = OffloadedState(self, state_dicts.dtypes(self.rule))
        self._state.replace(given)

    def _read_state(self, param: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """All state of the parameter `param`, read from where it is stored."""
        self.wait()
        self.engine.usability.require()
        self.engine.drop_plan()
        self.engine.weights.adapt_to_edits(reading=True)
        index = next(number for number, one in enumerate(self._params) if one is param)
        steps = [step if number == index else 0 for number, step in enumerate(self._steps)]
        return state_dicts.gather(self.engine, self._params, steps)[index]

    @torch.no_grad()
    def _reset_state(self, params: Collection[torch.Tensor] | None) -> None:
        """Resets the state of `params` (None for all parameters) to that of a new optimizer."""
        if "engine" not in self.__dict__ or not self.engine.usable:
            return
        self.wait()
        self._follow_params()
        self.engine.drop_plan()
        wanted = None if params is None else set(map(id, params))
        updated = {i for i, one in enumerate(self._params) if self._steps[i] and (wanted is None or id(one) in wanted)}
        with DelayInterrupt(), self.engine.usability.replacing_state():
            state_dicts.reset(self.engine, updated)
            for number in updated:
                self._steps[number] = 0
            self._state.forget([self._params[number] for number in updated])

    def _refresh_state_entry(self, param: int) -> None:
        """Sets the entry of an updated parameter in `optimizer.state`."""
        self._state.set_entry(self._params[param], state_dicts.names(self.engine, param))

    def _rebuild_state_view(self, users: Mapping[torch.Tensor, Mapping[str, Any]] | None = None) -> None:
        """Rebuilds `optimizer.state`. users: the user's own entries by parameter; None keeps the present ones."""
        self._state.reset_entries(self._state.user_entries(self._params) if users is None else users)
        for number, step in enumerate(self._steps):
            if step:
                self._refresh_state_entry(number)

    # ---- parameters that are moved, converted or replaced

    def _follow_params(self) -> None:
        """Adapts to parameters that were moved, converted or replaced; to be called before parameters are used.

        Before the first update, device and engine are rebuilt if parameters are on another device, have another dtype,
        shape or strides, or are other objects. After the first update, they are rebuilt if parameters were moved
        between groups, removed or added, or if some were replaced by new ones.

        Raises ParameterError, with nothing changed, for any other change after the first update, and if state or
        gradients cannot be transferred.
        """
        params = [param for group in self.param_groups for param in group["params"]]
        moved = self._param_records.first_moved(params) if self.engine.usable else None
        if moved is None:
            return
        fixed = self._has_stepped and not self._param_records.can_be_regrouped(params)
        if fixed or any(isinstance(param, LocalShard) for param in self._params):
            raise self._param_records.refusal(self.param_groups, moved)
        self._rebuild_engine(params, name_of(self.param_groups, moved))

    def _current_number(self, param: int) -> int | None:
        """Calls `_follow_params`, and returns the new number of the parameter; None when it is in no group any more."""
        whole = self._params[param]
        self._follow_params()
        if param < len(self._params) and self._params[param] is whole:
            return param
        return next((number for number, one in enumerate(self._params) if one is whole), None)

    def _rebuild_engine(self, params: list[torch.nn.Parameter], moved: str) -> None:
        """Builds engine and device again for the present `params`, and transfers settings, state, hooks and
        attachment. `moved`: name of the first parameter that was moved or replaced, for the text of errors."""
        self._step_results.wait_for_update()
        mapping = ParameterMapping(params, self._params)
        check_transferable(self.engine, any(self._steps), moved, self._param_records.are_reordered(params))
        claim(self, params)
        shards = [shard_of(param) for param in params]
        check_fits(shards, self.offload.accumulation)
        self.engine.drop_plan()
        state = mapping.remap(gather_for_transfer(self.engine, self._params, self._steps))
        warn_of_removed(mapping, self._steps)
        device = choose_device(self.offload, shards, self._implementation)
        try:
            self._checkpoints.finish()
            self.engine.close()
            engine = self._build_engine(params, layouts_of(self.param_groups, self.offload, self.rule), device)
            release_ownership(self, [self._params[number] for number in mapping.removed])
            self._params, self._steps = params, mapping.steps(self._steps)
            self._param_records, self.device, self.engine = ParameterRecords(params), device, engine
            self._ineffective.watch(len(params))
            self._step_results.engine = self._checkpoints.engine = engine
            self.phases.take_peak_bytes = device.take_peak_bytes
            engine.gradients.watch(self._gradient_arrived)
            self.check_knobs(self.knobs)
            self.apply_knobs(self.knobs)
            if state:
                state_dicts.scatter(engine, params, state)
            self._rebuild_state_view()
        except BaseException:
            with suppress(Exception):  # the error that is raised is the first one
                close_all(*([] if self.device is device else [device.close]), self.close)
            raise
        if not mapping.changes_nothing and self.overlap is not None:
            self.overlap.rebuild()
        if self.attachment is not None:
            self.attachment.rebuild()

    def _build_engine(self, params: Sequence[torch.nn.Parameter], layouts: Sequence[Layout], device: Device) -> Engine:
        norm, effective, source = self._norm_over_ranks(params), self._effective(self.knobs), self.gradient_source
        return build_engine(params, layouts, device, self._implementation, self.offload, effective, norm, source)

    # ---- life

    def close(self) -> None:
        """Stops lanes and telemetry and releases the parameters. The weights stay unchanged. Further calls do nothing,
        and so does a call in a forked child.

        Waits for a checkpoint that is still being written (Ctrl-C drops it). Raises CheckpointFailed, after everything
        is closed, if the checkpoint could not be completed.
        """
        if os.getpid() != self._pid:
            return
        try:
            if self.engine.usable:
                self.wait()
        except Exception:
            log.exception("the last update failed while the optimizer was closed")
        finally:
            try:
                self._checkpoints.finish()
            finally:
                self._close()
        self._checkpoints.raise_if_failed()

    def _close(self) -> None:
        parts = [part.close for part in (self.overlap, self.attachment) if part is not None]
        with DelayInterrupt():
            close_all(
                *parts,
                lambda: self.engine.close(self._why_closed),
                lambda: release_ownership(self, self._params),
                self._checkpoints.close,
            )

    @property
    def _is_mid_step(self) -> bool:
        """Whether closing now would break a step, or lose gradients that have no other copy."""
        gradients = self.engine.gradients
        held = gradients.any_released or bool(gradients.params_with_sums) or self.gradient_source.accumulating
        return self.engine.usable and (self._step_guard.is_stepping or held)

    @property
    def _is_of_this_process(self) -> bool:
        """False in a forked child that has inherited the optimizer."""
        return os.getpid() == self._pid

    def _close_for_new_owner(self) -> None:
        """Closes this optimizer because another one takes its parameters."""
        self._why_closed = "it was closed when another optimizer took its parameters"
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except Exception as error:
            if kind is None:  # else the exception of the block is more important
                raise
            if not isinstance(error, CheckpointFailed):  # which was logged
                log.exception("the optimizer could not be closed completely")

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "A Tidegate optimizer owns threads and buffers and cannot be copied or pickled; use state_dict()."
        )
