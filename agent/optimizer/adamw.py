"""`tidegate.AdamW`: a `torch.optim.Optimizer` with offloaded state, whose updates are planned and run by the engine."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol, Self

import torch

from tidegate.agent.checkpoints.background import PendingCheckpoint
from tidegate.agent.checkpoints.manifest import Checkpoint
from tidegate.agent.checkpoints.of_optimizer import CheckpointFiles, small_state
from tidegate.agent.checkpoints.reader import Reader
from tidegate.agent.checkpoints.writer import Target
from tidegate.agent.cleanup import close_all
from tidegate.agent.devices.base import Device
from tidegate.agent.devices.selection import check_one_place, choose_device, warn_if_emulated
from tidegate.agent.engine.engine import Engine
from tidegate.agent.engine.phases import PhaseRecorder
from tidegate.agent.gradients.accumulation import check_fits
from tidegate.agent.interrupts import DelayInterrupt
from tidegate.agent.optimizer import state_dicts
from tidegate.agent.optimizer.auto_knobs import AutoValues, as_knob_values
from tidegate.agent.optimizer.engine_builder import build_engine
from tidegate.agent.optimizer.gradient_arrival import handed_together
from tidegate.agent.optimizer.host_cache import automatic_cache_bytes
from tidegate.agent.optimizer.hyperparameters import (
    LossScale,
    called_by_grad_scaler,
    check_group,
    check_max_grad_norm,
    defaults_of,
    gradient_factor,
    step_inputs,
)
from tidegate.agent.optimizer.ineffective_steps import IneffectiveStepWarnings
from tidegate.agent.optimizer.offload import Offload, as_offload
from tidegate.agent.optimizer.shown_state import OffloadedState, user_entries
from tidegate.agent.optimizer.state_transfer import (
    ParameterMapping,
    check_can_follow,
    gather_for_transfer,
    transfer_backward_flags,
    warn_of_removed,
)
from tidegate.agent.optimizer.step_results import StepResultQueue
from tidegate.agent.optimizer.uncompiled import leave_uncompiled
from tidegate.agent.parameters.ownership import claim, release_ownership
from tidegate.agent.parameters.parameter_identity import ParameterRecords, name_of
from tidegate.agent.parameters.shards import LocalShard, shard_of
from tidegate.agent.parameters.subgroups import Layout, check_distinct, check_param, make_subgroups, shift_ids
from tidegate.agent.ranks import Ranks
from tidegate.errors import CheckpointFailed, ConfigError, EngineError, ParameterError
from tidegate.kernels import Scalars, scalars
from tidegate.knobs.knobs import Knobs, KnobValue, Off
from tidegate.plan.effective_knobs import Effective
from tidegate.timeline.timeline import PhaseSpan

GRAPH_CHECK_INTERVAL: Final = 16
"""The autograd graph is examined (see `handed_together`) in every so many-th step and in the first four steps. This
takes about 0.2 ms."""

log = logging.getLogger("tidegate")

NO_BACKWARD = -1
"""The id that autograd gives for the current backward pass when no backward pass is running."""


class Closeable(Protocol):
    """An object that is closed together with the optimizer."""

    def close(self) -> None: ...


class RebuildListener(Closeable, Protocol):
    """An object that adapts to a rebuilt engine."""

    def rebuild(self) -> None:
        """Called when the optimizer has other parameters, or works on another device."""


class AttachmentListener(RebuildListener, Protocol):
    """An attachment (`tidegate.attach`), as the optimizer sees it."""

    def extended(self) -> None:
        """Called when parameters were added to the optimizer."""

    def resumed(self) -> None:
        """Called when the optimizer has loaded a state, and counts its steps on from there."""


class AdamW(torch.optim.Optimizer):
    """AdamW with offloaded state; for given gradients its weights equal the oracle's bit for bit.

    params, lr, betas, eps, weight_decay, maximize: as in `torch.optim.AdamW`.
    decoupled: False gives Adam, with weight decay as an L2 term.
    max_grad_norm: clips the norm of all gradients to this; None leaves them.
    offload: see `Offload`.
    torch_options: further arguments of `torch.optim.AdamW`. `foreach` and `fused` are accepted and ignored;
        `amsgrad`, `capturable` and `differentiable` are refused unless False.

    Raises ParameterError for no, sparse, shared or unsupported parameters. Use it as a context manager, or `close()`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        decoupled: bool = True,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        offload: Offload | None = None,
        **torch_options: Any,
    ) -> None:
        defaults = defaults_of(
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            {**torch_options, "maximize": maximize, "decoupled_weight_decay": decoupled},
        )
        check_max_grad_norm(max_grad_norm)
        if isinstance(params, torch.Tensor):
            raise TypeError(f"params must be an iterable of tensors or dicts, but is one {torch.typename(params)}.")
        params = list(params)
        if not params:
            raise ParameterError("The optimizer got no parameters: pass model.parameters().")
        super().__init__(params, defaults)
        leave_uncompiled()
        self.offload = as_offload(offload)
        self.max_grad_norm = max_grad_norm
        self.make_scalars: Callable[..., Scalars] = scalars
        """Makes the numbers of an update from hyperparameters and step: `kernels.scalars`, or a function with the same
        signature."""
        self.make_factor: Callable[[float, float, float | None], float] = gradient_factor
        """Gives the factor for all gradients: `gradient_factor`, or a function with the same signature."""
        self.num_steps = 0
        """Number of calls of `step()` with gradients, continued from a loaded state."""
        self._params: list[torch.nn.Parameter] = [p for group in self.param_groups for p in group["params"]]
        self._steps = [0] * len(self._params)
        self._pid = os.getpid()
        self._why_closed = "it was closed"
        check_fits([shard_of(param) for param in self._params], self.offload.accumulation)
        claim(self, self._params)
        self.device = choose_device(self.offload, [shard_of(param) for param in self._params])
        warn_if_emulated(self.device)
        layouts = self._layouts()
        self.knobs = self.offload.knobs()
        self._auto = AutoValues(
            cache_bytes=automatic_cache_bytes(self.offload, list(map(shard_of, self._params)), layouts)
        )
        try:
            self.engine = build_engine(self._params, layouts, self.device, self.offload, self._effective(self.knobs))
        except BaseException:
            release_ownership(self, self._params)
            raise
        self._param_records = ParameterRecords(self._params)
        self._has_stepped = False
        """Whether there was an update: from then on, parameters may no longer change device, dtype, shape or
        strides."""
        self.phases = PhaseRecorder(self.device.take_peak_bytes)
        self._step_results = StepResultQueue(self.engine, self.phases)
        self._ineffective = IneffectiveStepWarnings(self._names())
        self._ineffective.watch(len(self._params))
        self.observers = self._step_results.observers
        """Called in the training thread with the result of each update: at the end of `step()`, or later if the update
        is still running then."""
        self.observers.append(self._ineffective.observe)
        self.boundaries: list[Callable[[int], None]] = []
        """Called at the end of each `step()`, on all ranks, with the number of the next step: knobs change here."""
        self.attachment: AttachmentListener | None = None
        self.overlap: RebuildListener | None = None
        self.background = False
        """Whether `step()` returns as soon as the update is certain, and the update continues in the background. See
        `overlap_forward`."""
        self._stepping: dict[str, object] = {}
        """Holds the call of `step()` that is running, under "call". A dict instead of a lock, because an exception from
        a signal handler must not leave it taken."""
        self._together = 0.0
        self._backward_id = NO_BACKWARD
        self._moves_checked_in = NO_BACKWARD
        """Id of the last backward pass at whose first gradient all parameters were checked for moves."""
        self._checkpoints = CheckpointFiles(self.engine, self.phases)
        try:
            self.check_knobs(self.knobs)
            self.apply_knobs(self.knobs)
        except BaseException:
            self.close()
            raise
        self.engine.gradients.watch(self.gradient_arrived)

    # ---- training

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Does one update. `closure` re-evaluates the model and returns the loss, as in torch.

        CheckpointFailed, once and before anything is done, when a checkpoint that was begun could not be completed;
        with several ranks, the next checkpoint raises the error instead.
        """
        self._checkpoints.raise_if_failed_alone()
        call = object()
        try:
            if self._stepping.setdefault("call", call) is not call:
                raise EngineError(
                    "step() of this optimizer is running already, in another thread or around this call. Call it from "
                    "one thread at a time: take a lock around backward() and step(), or give each thread an optimizer."
                )
            return self._step(closure)
        finally:
            if self._stepping.get("call") is call:
                del self._stepping["call"]

    def _step(self, closure: Callable[[], float] | None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.wait()
        self.follow_params()
        has_gradients = self.engine.gradients.any_in_sums or any(p.grad is not None for p in self._params)
        self._ineffective.had_gradients(len(self._params), has_gradients)
        if not has_gradients:
            return loss
        loss_scale = LossScale.of(self)
        self.phases.enter("update")
        with DelayInterrupt():
            num_begun = self.engine.num_updates_begun
            try:
                self._update(loss_scale)
            except BaseException as error:
                if self.engine.num_updates_begun != num_begun:
                    self.engine.fail_uncounted_step(error)
                raise
            self._step_results.deliver(background=self.background)
            for boundary in tuple(self.boundaries):
                boundary(self.num_steps + 1)
        return loss

    def _update(self, loss_scale: LossScale) -> None:
        """Has the engine update the weights, and counts the update."""
        with self.phases.exposed():
            inputs = step_inputs(
                self.param_groups, self._steps, loss_scale, self.max_grad_norm, self.make_scalars, self.make_factor
            )
            had_stepped, self._has_stepped = self._has_stepped, True
            updated = self.engine.step(inputs)
            self._has_stepped = had_stepped or bool(updated)
            for param in updated:
                self._steps[param] += 1
                if self._steps[param] == 1:
                    self._refresh_state_entry(param)
            if updated:
                self._ineffective.updated(updated, self._params)
            self.phases.began_at(self.engine.gradients_made_at, before="backward")
            if not self.background:
                self._step_results.wait_for_update()
        self.num_steps += 1
        self.phases.enter("other")
        self._step_results.end_step()

    def wait(self) -> None:
        """Waits until all weights are updated; needed where `step()` returns earlier (`tidegate.overlap_forward`)."""
        with self.phases.exposed():
            self._step_results.wait_for_update()
        self._step_results.deliver(background=self.background)

    def wait_for_weights(self, params: Collection[int]) -> None:
        """Makes device work that is enqueued from now on wait for the update of these parameters (numbered through all
        `param_groups`)."""
        if self.engine.running:
            with self.phases.exposed():
                self.engine.wait_for_weights(params)

    @property
    def num_skipped(self) -> int:
        """Steps that were skipped because gradients were not finite."""
        return self._ineffective.num_skipped

    def _names(self) -> Callable[[int], str]:
        """A function that gives the name of a parameter by its number, and keeps no reference to the optimizer."""
        optimizer_ref = weakref.ref(self)

        def name(param: int) -> str:
            optimizer = optimizer_ref()
            return str(param) if optimizer is None else name_of(optimizer.param_groups, param)

        return name

    @property
    def steps(self) -> tuple[int, ...]:
        """Number of updates of each parameter."""
        return tuple(self._steps)

    def phases_so_far(self) -> tuple[PhaseSpan, ...]:
        """Phases of the steps that observers have not received yet, the current phase up to now. From any thread."""
        return self._step_results.phases_so_far()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Context manager for backward passes that are not the last of their step. Required with
        gradients="release"."""
        before, self.engine.gradients.accumulating = self.engine.gradients.accumulating, True
        try:
            yield
        finally:
            self.engine.gradients.accumulating = before

    _state: Any
    """An `OffloadedState`, except while torch packs a state dict: then a plain dictionary of values."""

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether GradScaler passes on its scale instead of dividing all gradients by it."""
        return called_by_grad_scaler()

    def log(self, *, loss: float | None = None, tokens: int | None = None) -> None:
        """Adds figures of the training loop to the metrics: loss and number of tokens of the next step."""
        self._step_results.log(loss, tokens)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. A running update keeps the gradients that it reads; setting them to zero waits for the
        update."""
        if not set_to_none:
            self.wait()
        if not self.engine.running:
            self.engine.drop_plan(dropping=True)
            self.engine.gradients.forget()
        super().zero_grad(set_to_none)

    def backward_began(self, *_: Any) -> None:
        """To be called by hooks inside a backward pass: begins the phase `backward`, which lasts until the pass
        ends."""
        self.phases.enter("backward")
        backward_id = torch._C._current_graph_task_id()
        if backward_id != self._backward_id:
            self._backward_id = backward_id
            if self.num_steps < 4 or self.num_steps % GRAPH_CHECK_INTERVAL == 0:
                self._together = self._handed_together()
            self.phases.handed_together = self._together
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _handed_together(self) -> float:
        node = torch._C._current_autograd_node()
        params = [param for group in self.param_groups for param in group["params"] if param.requires_grad]
        return handed_together(node, params) if node is not None else 0.0

    def _backward_ended(self) -> None:
        if self.phases.current == "backward":
            self.phases.enter("other")

    def gradient_arrived(self, param: int) -> None:
        """To be called when the backward pass has written `.grad` of the parameter with this number: by autograd's
        hooks, and by code that writes `.grad` in hooks of its own. This runs for each gradient, so it must be cheap."""
        task = torch._C._current_graph_task_id()
        if task != self._moves_checked_in or self._param_records.was_moved(param):
            self._moves_checked_in = task
            number = self._current_number(param)
            if number is None:
                return
            param = number
        if task != NO_BACKWARD and (self._backward_id != task or self.phases.current != "backward"):
            self.backward_began()
        began = time.monotonic()
        self.phases.gradient_came(began)
        try:
            if self.engine.running:
                self._step_results.wait_for_update()
            self.engine.gradient_accumulated(param)
        finally:
            self.phases.blocked(time.monotonic() - began)

    # ---- knobs

    def check_knobs(self, knobs: Knobs) -> None:
        """MemoryBudgetError or CapacityError with figures when these knobs do not fit, KnobError when they name a path
        that this run does not have. Safe from any thread."""
        self.engine.planner.check(self._effective(knobs), self.offload.headroom_bytes)

    def apply_knobs(self, knobs: Knobs) -> None:
        """Sets the knobs, from the next step on. Between steps only."""
        self.knobs = knobs
        self.engine.effective = self._effective(knobs)
        self.engine.stage()

    def set_auto(
        self, *, stride: float | Off | None = None, alternate: bool | None = None, cache_bytes: int | None = None
    ) -> None:
        """Sets the values that `auto` stands for, from the next step on; None leaves a value unchanged.

        MemoryBudgetError or CapacityError, with nothing changed, if it does not fit.
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

    def _effective(self, knobs: Knobs) -> Effective:
        return self._auto.effective(knobs, self.offload.policy)

    def automatic_cache_bytes(self) -> int:
        """Bytes that `auto` allows for the host cache, from the host memory that is free now or taken by this
        optimizer."""
        held_bytes = sum(self.engine.memory.host_bytes().values())
        return automatic_cache_bytes(self.offload, self.engine.shards, self.engine.layouts, held_bytes)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """A state as that of `torch.optim.AdamW`: step, exp_avg, exp_avg_sq of each parameter that was updated. In
        addition to `state` and `param_groups`, it has `num_steps` if steps were skipped, so that the largest `step` is
        smaller."""
        self.wait()
        self._follow_before_first_step()
        self.engine.require_usable()
        self.engine.drop_plan()
        with self.phases.within("checkpoint"):
            self.engine.weights.take_edited(reading=True)
            gathered = state_dicts.gather(self.engine, self._params, self._steps)
            shown = self._state
            # While torch packs the state and runs its hooks.
            self._state = shown.with_values({self._params[index]: values for index, values in gathered.items()})
            try:
                packed = super().state_dict()
            finally:
                self._state = shown
        return state_dicts.with_num_steps(packed, self.num_steps, self._steps)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state of this class or of `torch.optim.AdamW`. Load the weights first: the state adapts to them.

        ConfigError, with nothing changed, when the state is of another model or another rule.
        """
        self.engine.require_loadable()
        self.follow_params()
        given = state_dicts.apply_load_pre_hooks(self, state_dict)
        state, others = state_dicts.by_position(given)
        state_dicts.check(given["param_groups"], state, self._params)
        num_steps = state_dicts.total_steps(given, [])
        if self.engine.usable:
            self.wait()
        self.engine.drop_plan()
        with DelayInterrupt():
            with state_dicts.without_torch_load_hooks(self):
                # torch's own loader would cast moments to the dtype of the weight.
                super().load_state_dict({"state": others, "param_groups": given["param_groups"]})
            with self.phases.within("checkpoint"), self.engine.replacing_state():
                state_dicts.scatter(self.engine, self._params, state)
                self._steps = [int(state[i]["step"]) if i in state else 0 for i in range(len(self._params))]
                self._step_results.forget()
                self._rebuild_state_view({self._params[i]: user_entries(values) for i, values in state.items()})
                self._set_num_steps(max([num_steps, *self._steps]))
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def save_checkpoint(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 1,
        save_also: Callable[[Path], object] | None = None,
    ) -> Checkpoint:
        """Writes `directory/step-<n>` without gathering state in memory. All ranks call it, on a directory all see.

        keep: number of complete checkpoints that are kept, the newest ones.
        save_also: called with the folder of this rank's files. Files that it writes there, such as the model's weights,
            become part of the checkpoint, with a checksum of each, and are deleted with it. ConfigError for anything
            but plain files and directories.

        PathFull when there is no space for the checkpoint, or for state that is flushed after it; CheckpointTaken when
        another run or optimizer saves there; CheckpointFailed when it cannot be written. Older checkpoints are
        unchanged after an error, and training may continue.
        """
        self.wait()
        self._follow_before_first_step()
        return self._checkpoints.save(Target(directory, keep, save_also), self._small_state, self.num_steps)

    def begin_checkpoint(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 1,
        save_also: Callable[[Path], object] | None = None,
        memory_bytes: int | None = None,
    ) -> PendingCheckpoint:
        """As `save_checkpoint`, but a thread copies the state that cannot be hard-linked (on other file systems, in
        host memory, on the device) while training continues. `result()` of the returned object waits for the end.

        save_also: is called now, and training waits for it.
        memory_bytes: host memory for copies of state that is not on a path, until they are written; None for half of
            the free host memory. State that does not fit is written at once.

        The next checkpoint, `close` and the end of the process wait for this checkpoint. If it cannot be completed,
        `result`, or the next `step`, checkpoint or `close`, raises CheckpointFailed. PathFull as in `save_checkpoint`.
        """
        self.wait()
        self._follow_before_first_step()
        target = Target(directory, keep, save_also)
        return self._checkpoints.begin(target, self._small_state, self.num_steps, memory_bytes)

    @torch.no_grad()
    def load_checkpoint(self, directory: str | os.PathLike[str] | Checkpoint, *, step: int | None = None) -> Checkpoint:
        """Loads the newest complete checkpoint in `directory`, or that of `step`, or the given `Checkpoint`. Load the
        weights of the checkpoint first.

        Paths, split, stride and size of subgroups may differ from those at saving. Checkpoints with a damaged manifest
        are skipped with a warning; if `step` names such a checkpoint, an error gives the reason. Damage in the data is
        an error, because an older state would not match the weights; `find_sound_checkpoint` finds such damage first.

        Raises, with nothing changed: NoCheckpoint; FileDamaged when files of `save_also` have changed; ForeignState or
        WeightsMismatch for another model, other weights or another number of ranks. Another `StateFileError` for
        damage: when it is found in the data, this optimizer is not usable until a whole checkpoint is loaded.
        """
        self.engine.require_loadable()
        self.follow_params()
        if self.engine.usable:
            self.wait()
        found = self._checkpoints.find(directory, step)
        with Reader(found, self.engine.shards, Ranks.current()) as reader:
            small = reader.optimizer()
            self.engine.drop_plan()
            with state_dicts.without_torch_load_hooks(self):
                super().load_state_dict({"state": small["state"], "param_groups": small["param_groups"]})
            self._checkpoints.load_state(found, reader)
            self._steps = list(small["steps"])
        self._step_results.forget()
        self._rebuild_state_view({})
        self._set_num_steps(found.step)
        return found

    def _set_num_steps(self, num_steps: int) -> None:
        """Sets the number of steps, here and in telemetry."""
        self.num_steps = num_steps
        if self.attachment is not None:
            self.attachment.resumed()

    def _small_state(self) -> dict[str, Any]:
        return small_state(self, self._params, self._steps)

    @property
    def state(self) -> Any:
        """The state, as in torch: a lazy view of the offloaded state, see `OffloadedState`."""
        return self._state

    @state.setter
    def state(self, given: Mapping[Any, Any]) -> None:
        if "_state" not in self.__dict__:
            self._state = OffloadedState(self)
        self._state.replace(given)

    def read_state(self, param: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """All state of one parameter, read from where it is stored."""
        self.wait()
        self.engine.require_usable()
        self.engine.drop_plan()
        self.engine.weights.take_edited(reading=True)
        index = next(number for number, one in enumerate(self._params) if one is param)
        steps = [step if number == index else 0 for number, step in enumerate(self._steps)]
        return state_dicts.gather(self.engine, self._params, steps)[index]

    @torch.no_grad()
    def reset_state(self, params: Collection[torch.Tensor] | None) -> None:
        """Resets the state of these parameters (None for all) to that of a new optimizer."""
        if "engine" not in self.__dict__ or not self.engine.usable:
            return
        self.wait()
        self.follow_params()
        self.engine.drop_plan()
        wanted = None if params is None else set(map(id, params))
        updated = {i for i, one in enumerate(self._params) if self._steps[i] and (wanted is None or id(one) in wanted)}
        with DelayInterrupt(), self.engine.replacing_state():
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

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes over loaded param groups (torch calls this); groups of older versions may lack keys. Entries of the
        state that belong to no parameter are taken over, too."""
        given = dict(state)
        others = given.pop("state", {})
        super().__setstate__(given)
        self._state.take_others(others)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            if self.defaults["decoupled_weight_decay"]:
                # As in torch's AdamW: a state of Adam does not make it Adam.
                group["decoupled_weight_decay"] = True

    # ---- parameters that are moved, converted or replaced

    def follow_params(self) -> None:
        """Adapts to parameters that were moved, converted or replaced; to be called before parameters are used.

        Before the first update, device and engine are rebuilt when parameters are on another device, have another
        dtype, shape or strides, or are other objects. After it, they are rebuilt when parameters were moved between
        groups, removed or added, or some were replaced by new ones.

        ParameterError, with nothing changed, for any other change after the first update, and where state or gradients
        cannot be transferred.
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
        """Calls `follow_params`, and returns the new number of the parameter; None when it is in no group any more."""
        whole = self._params[param]
        self.follow_params()
        if param < len(self._params) and self._params[param] is whole:
            return param
        return next((number for number, one in enumerate(self._params) if one is whole), None)

    def _follow_before_first_step(self) -> None:
        """Calls `follow_params` before the first update only: later, state can be read wherever the parameters are."""
        if not self._has_stepped:
            self.follow_params()

    def _rebuild_engine(self, params: list[torch.nn.Parameter], moved: str) -> None:
        """Builds engine and device again for the present `params`, and transfers settings, state, hooks and
        attachment."""
        self._step_results.wait_for_update()
        mapping = ParameterMapping(params, self._params)
        check_can_follow(self.engine, any(self._steps), moved, self._param_records.are_reordered(params))
        claim(self, params)
        shards = [shard_of(param) for param in params]
        check_fits(shards, self.offload.accumulation)
        self.engine.drop_plan()
        state = mapping.remap(gather_for_transfer(self.engine, self._params, self._steps))
        warn_of_removed(mapping, self._steps)
        device = choose_device(self.offload, shards)
        try:
            self._checkpoints.finish()
            self.engine.close()
            engine = build_engine(params, self._layouts(), device, self.offload, self._effective(self.knobs))
            transfer_backward_flags(self.engine, engine)
            release_ownership(self, [self._params[number] for number in mapping.removed])
            self._set_engine(params, device, engine, mapping.steps(self._steps))
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

    def _set_engine(self, params: list[torch.nn.Parameter], device: Device, engine: Engine, steps: list[int]) -> None:
        """Replaces parameters, device, engine and step counts."""
        self._params, self._steps, self._param_records = params, steps, ParameterRecords(params)
        self.device, self.engine = device, engine
        self._ineffective.watch(len(params))
        self._step_results.engine = self._checkpoints.engine = engine
        self.phases.take_peak_bytes = device.take_peak_bytes
        engine.gradients.watch(self.gradient_arrived)

    # ---- life

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, also during training; MemoryBudgetError, with nothing changed, when the new state does not
        fit."""
        check_group(param_group)
        if not hasattr(self, "engine"):
            super().add_param_group(param_group)
            check_distinct(self.param_groups[-1]["params"])
            return
        self.wait()
        self.engine.require_usable()
        self.follow_params()
        self.engine.drop_plan()
        with DelayInterrupt():
            self._add_param_group(param_group)

    def _add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            params = self.param_groups[-1]["params"]
            check_distinct(params)
            check_one_place([shard_of(param) for param in (*self._params, *params)])
            layouts = self._layouts_of_added(params)
            self.engine.planner.check(self.engine.effective, self.offload.headroom_bytes, layouts)
            claim(self, params, beside=self._params)
        except ConfigError:
            self.param_groups.pop()
            raise
        self._params += params
        self._steps += [0] * len(params)
        self._param_records.extend(params)
        self._ineffective.watch(len(self._params))
        self.engine.extend(params, layouts)
        self.engine.stage()
        if self.overlap is not None:
            self.overlap.rebuild()
        if self.attachment is not None:
            self.attachment.extended()

    def _layouts(self) -> tuple[Layout, ...]:
        """The subgroups of all parameters in the groups."""
        shards = [[shard_of(param) for param in group["params"]] for group in self.param_groups]
        return make_subgroups(shards, self.offload.subgroup_numel)

    def _layouts_of_added(self, params: list[torch.nn.Parameter]) -> list[Layout]:
        """The subgroups of added parameters, with numbers after the existing ones."""
        for index, param in enumerate(params, start=len(self._params)):
            check_param(shard_of(param), index)
        layouts = make_subgroups([[shard_of(param) for param in params]], self.offload.subgroup_numel)
        known = len(self.engine.layouts)
        return shift_ids(layouts, subgroups=known, groups=len(self.param_groups) - 1, params=len(self._params))

    def close(self) -> None:
        """Stops lanes and telemetry and releases the parameters. The weights stay. Idempotent; does nothing in a forked
        child.

        Waits for a checkpoint that is still being written (Ctrl-C drops it). CheckpointFailed, after all is closed, if
        the checkpoint could not be completed.
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
    def is_mid_step(self) -> bool:
        """Whether closing now would break a step, or lose gradients that have no other copy."""
        gradients = self.engine.gradients
        held = gradients.any_released or gradients.any_in_sums or gradients.accumulating
        return self.engine.usable and (bool(self._stepping) or held)

    @property
    def is_of_this_process(self) -> bool:
        """False in a forked child that has inherited the optimizer."""
        return os.getpid() == self._pid

    def close_for_new_owner(self) -> None:
        """Closes this optimizer because another one takes its parameters."""
        self._why_closed = "it was closed when another optimizer took its parameters"
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except CheckpointFailed:
            if kind is None:  # else the exception of the block is more important; this one was logged
                raise
        except Exception:
            if kind is None:
                raise
            log.exception("the optimizer could not be closed completely")

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "A Tidegate optimizer owns threads and buffers and cannot be copied or pickled; use state_dict()."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.__getstate__()
