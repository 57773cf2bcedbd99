"""`tidegate.AdamW`: a `torch.optim.Optimizer` whose state lives outside the device and whose update is a plan."""

from __future__ import annotations

import logging
import os
import threading
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
from tidegate.agent.devices.selection import check_one_place, choose_device, say_if_emulated
from tidegate.agent.engine.engine import Engine
from tidegate.agent.engine.interrupts import DelayInterrupt
from tidegate.agent.engine.phases import PhaseRecorder
from tidegate.agent.gradients.accumulation import check_fits
from tidegate.agent.optimizer import state_dicts
from tidegate.agent.optimizer.auto_knobs import Auto, in_force
from tidegate.agent.optimizer.engine_builder import build_engine
from tidegate.agent.optimizer.gradient_arrival import handed_together
from tidegate.agent.optimizer.host_cache import ample_cache
from tidegate.agent.optimizer.hyperparameters import (
    LossScale,
    asked_by_grad_scaler,
    check_group,
    check_max_grad_norm,
    defaults_of,
    gradient_factor,
    step_inputs,
)
from tidegate.agent.optimizer.ineffective_steps import Fruitless
from tidegate.agent.optimizer.offload import Offload, as_offload
from tidegate.agent.optimizer.shown_state import OffloadedState, users_part
from tidegate.agent.optimizer.state_transfer import Regrouping, carried, check_can_follow, hand_over, warn_of_removed
from tidegate.agent.optimizer.step_results import Outcomes
from tidegate.agent.parameters.ownership import claim, give_up
from tidegate.agent.parameters.parameter_identity import Homes, name_of
from tidegate.agent.parameters.shards import Part, shard_of
from tidegate.agent.parameters.subgroups import Layout, check_distinct, check_param, cut, renumbered
from tidegate.agent.ranks import Ranks
from tidegate.errors import CheckpointFailed, ConfigError, EngineError, ParameterError
from tidegate.kernels import Scalars, scalars
from tidegate.knobs.knobs import Knobs, KnobValue, Off
from tidegate.plan.effective_knobs import Effective
from tidegate.timeline.timeline import PhaseSpan

LOOK_AT_GRAPH_STEPS: Final = 16
"""In one of so many steps, and in the first four, the graph of the backward is looked at; it takes about 0.2 ms."""

log = logging.getLogger("tidegate")

NO_BACKWARD = -1
"""Autograd's number of the present backward pass where there is none."""


class Closeable(Protocol):
    def close(self) -> None: ...


class Dependent(Closeable, Protocol):
    def rebuild(self) -> None:
        """The optimizer has other parameters, or works on another device."""


class Attached(Dependent, Protocol):
    def extended(self) -> None:
        """The optimizer has more parameters."""

    def resumed(self) -> None:
        """The optimizer has loaded a state, and counts its steps from there."""


class AdamW(torch.optim.Optimizer):
    """AdamW with offloaded state; for given gradients its weights equal the oracle's bit for bit.

    params, lr, betas, eps, weight_decay, maximize: as in `torch.optim.AdamW`.
    decoupled: False gives Adam, with weight decay as an L2 term.
    max_grad_norm: clips the norm of all gradients to this; None leaves them.
    offload: see `Offload`.
    torch_options: further arguments of `torch.optim.AdamW`. `foreach` and `fused` are accepted and mean nothing;
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
        self.offload = as_offload(offload)
        self.max_grad_norm = max_grad_norm
        self.make_scalars: Callable[..., Scalars] = scalars
        """What an update computes with, from hyperparameters and step: `kernels.scalars`, or one of its signature."""
        self.make_factor: Callable[[float, float, float | None], float] = gradient_factor
        """What gradients are multiplied with: `gradient_factor`, or one of its signature."""
        self.num_steps = 0
        """Calls of `step()` that had gradients, those before the state that was loaded included."""
        self._params: list[torch.nn.Parameter] = [p for group in self.param_groups for p in group["params"]]
        self._steps = [0] * len(self._params)
        self._pid = os.getpid()
        self._why_closed = "it was closed"
        check_fits([shard_of(param) for param in self._params], self.offload.accumulation)
        claim(self, self._params)
        self.device = choose_device(self.offload, [shard_of(param) for param in self._params])
        say_if_emulated(self.device)
        layouts = self._layouts()
        self.knobs = self.offload.knobs()
        self._auto = Auto(cache_bytes=ample_cache(self.offload, list(map(shard_of, self._params)), layouts))
        try:
            self.engine = build_engine(self._params, layouts, self.device, self.offload, self._effective(self.knobs))
        except BaseException:
            give_up(self, self._params)
            raise
        self._homes = Homes(self._params)
        self._is_stepping = False
        self._has_stepped = False
        """From the first update on, its state belongs to the device and to the form that the parameters have."""
        self.phases = PhaseRecorder(self.device.take_peak_bytes)
        self._outcomes = Outcomes(self.engine, self.phases)
        self._fruitless = Fruitless(self._names())
        self._fruitless.watch(len(self._params))
        self.observers = self._outcomes.observers
        """Called in the training thread when an update is done: in its `step()`, or later if it goes on meanwhile."""
        self.observers.append(self._fruitless.observe)
        self.boundaries: list[Callable[[int], None]] = []
        """Called at the end of each `step()`, by all ranks, with the number of the next one: knobs change here."""
        self.attachment: Attached | None = None
        self.overlap: Dependent | None = None
        self.background = False
        """`step()` returns when it is known that there is an update, which goes on meanwhile. See `overlap_forward`."""
        self._stepping = threading.Lock()
        self._together = 0.0
        self._backward_id = NO_BACKWARD
        self._looked_in = NO_BACKWARD
        """The backward pass at whose first gradient was looked whether parameters were moved."""
        self._checkpoints = CheckpointFiles(self.engine, self.phases)
        try:
            self.check_knobs(self.knobs)
            self.apply_knobs(self.knobs)
        except BaseException:
            self.close()
            raise
        self.engine.watch(self.gradient_arrived)

    # ---- training

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update. `closure` re-evaluates the model and returns the loss, as in torch.

        CheckpointFailed, once and with nothing done, when a checkpoint that was begun could not be completed; with
        several ranks at the next checkpoint instead.
        """
        self._checkpoints.raise_if_failed_alone()
        if not self._stepping.acquire(blocking=False):
            raise EngineError(
                "step() of this optimizer is going on already, in another thread or around this call. Call it from one "
                "thread at a time: take a lock around backward() and step(), or give each thread an optimizer."
            )
        self._is_stepping = True
        try:
            return self._step(closure)
        finally:
            self._is_stepping = False
            self._stepping.release()

    def _step(self, closure: Callable[[], float] | None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.wait()
        self.follow_params()
        has_gradients = self.engine.gradients.any_set_aside or any(p.grad is not None for p in self._params)
        self._fruitless.had_gradients(len(self._params), has_gradients)
        if not has_gradients:
            return loss
        loss_scale = LossScale.of(self)
        self.phases.enter("update")
        with DelayInterrupt():
            with self.phases.exposed():
                had_stepped, self._has_stepped = self._has_stepped, True
                inputs = step_inputs(
                    self.param_groups, self._steps, loss_scale, self.max_grad_norm, self.make_scalars, self.make_factor
                )
                updated = self.engine.step(inputs)
                self._has_stepped = had_stepped or bool(updated)
                for param in updated:
                    self._steps[param] += 1
                    if self._steps[param] == 1:
                        self._show_state(param)
                if updated:
                    self._fruitless.updated(updated, self._params)
                self.phases.began_at(self.engine.gradients_made_at, before="backward")
                if not self.background:
                    self._outcomes.settle()
            self.num_steps += 1
            self.phases.enter("other")
            self._outcomes.end_step()
            self._outcomes.deliver(background=self.background)
            for boundary in tuple(self.boundaries):
                boundary(self.num_steps + 1)
        return loss

    def wait(self) -> None:
        """Waits until all weights are updated, where `step()` returns before (`tidegate.overlap_forward`)."""
        with self.phases.exposed():
            self._outcomes.settle()
        self._outcomes.deliver(background=self.background)

    def wait_for_weights(self, params: Collection[int]) -> None:
        """What is enqueued from now on reads these weights (numbers as in `param_groups`) as the update leaves them."""
        if self.engine.running:
            with self.phases.exposed():
                self.engine.wait_for_weights(params)

    @property
    def num_skipped(self) -> int:
        """Steps that were skipped because gradients were not finite."""
        return self._fruitless.num_skipped

    def _names(self) -> Callable[[int], str]:
        """What parameters are called; holds nothing."""
        held = weakref.ref(self)

        def name(param: int) -> str:
            optimizer = held()
            return str(param) if optimizer is None else name_of(optimizer.param_groups, param)

        return name

    @property
    def steps(self) -> tuple[int, ...]:
        """How often each parameter was updated."""
        return tuple(self._steps)

    def phases_so_far(self) -> tuple[PhaseSpan, ...]:
        """Phases of the steps that observers have not heard of, the present one as far as it got. From any thread."""
        return self._outcomes.phases_so_far()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """A backward pass that is not the last one of its step. With gradients="release" it must be said."""
        before, self.engine.gradients.accumulating = self.engine.gradients.accumulating, True
        try:
            yield
        finally:
            self.engine.gradients.accumulating = before

    _state: Any
    """An `OffloadedState`, but for while a state is packed."""

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler hands over its scale instead of dividing all gradients by it."""
        return asked_by_grad_scaler()

    def log(self, *, loss: float | None = None, tokens: int | None = None) -> None:
        """Tells the metrics what training makes: the loss of the step that comes next, the tokens that it took."""
        self._outcomes.log(loss, tokens)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. An update that goes on has its own hold on the gradients that it reads; zeroing waits."""
        if not set_to_none:
            self.wait()
        if not self.engine.running:
            self.engine.drop_plan(dropping=True)
            self.engine.gradients.forget()
        super().zero_grad(set_to_none)

    def backward_began(self, *_: Any) -> None:
        """A backward pass is under way, in the phase of that name until it ends. To be called by hooks inside it."""
        self.phases.enter("backward")
        backward_id = torch._C._current_graph_task_id()
        if backward_id != self._backward_id:
            self._backward_id = backward_id
            if self.num_steps < 4 or self.num_steps % LOOK_AT_GRAPH_STEPS == 0:
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
        """`.grad` of this parameter (its number) is what a backward made it. Autograd's hooks call it; so does who
        writes `.grad` in its own hooks. Once per gradient, so it saves calls."""
        task = torch._C._current_graph_task_id()
        if task != self._looked_in or self._homes.was_moved(param):
            self._looked_in = task
            found = self._followed(param)
            if found is None:
                return
            param = found
        if task != NO_BACKWARD and (self._backward_id != task or self.phases.current != "backward"):
            self.backward_began()
        began = time.monotonic()
        self.phases.gradient_came(began)
        try:
            if self.engine.running:
                self._outcomes.settle()
            self.engine.gradient_accumulated(param)
        finally:
            self.phases.blocked(time.monotonic() - began)

    # ---- knobs

    def check_knobs(self, knobs: Knobs) -> None:
        """MemoryBudgetError or CapacityError with figures when these knobs do not fit, KnobError when they name a path
        that is not there. Safe from any thread."""
        self.engine.check(self._effective(knobs), self.offload.headroom_bytes)

    def apply_knobs(self, knobs: Knobs) -> None:
        """These knobs from the next step on. Between steps only."""
        self.knobs = knobs
        self.engine.effective = self._effective(knobs)
        self.engine.stage()

    def set_auto(
        self, *, stride: float | Off | None = None, alternate: bool | None = None, cache_bytes: int | None = None
    ) -> None:
        """What `auto` stands for from the next step on, where it is not None.

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
        """What is in force. Knobs of storage paths are there when the run has paths."""
        residences = self.engine.residences
        return in_force(self.engine.effective, None if residences is None else residences.counts)

    def _effective(self, knobs: Knobs) -> Effective:
        return self._auto.effective(knobs, self.offload.policy)

    def ample_cache(self) -> int:
        """Bytes that a host cache may have by what is free now, what this optimizer has already taken included."""
        held_bytes = sum(self.engine.memory.host_bytes().values())
        return ample_cache(self.offload, self.engine.shards, self.engine.layouts, held_bytes)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """As `torch.optim.AdamW`'s: step, exp_avg, exp_avg_sq of each parameter that was updated. Beside `state` and
        `param_groups` it has `num_steps` where that is not the largest `step`: steps were skipped."""
        self.wait()
        self._follow_until_stepped()
        self.engine.require_usable()
        self.engine.drop_plan()
        with self.phases.within("checkpoint"):
            self.engine.weights.take_edited(reading=True)
            gathered = state_dicts.gather(self.engine, self._params, self._steps)
            shown = self._state
            # For as long as torch packs it and runs its hooks.
            self._state = shown.with_values({self._params[index]: values for index, values in gathered.items()})
            try:
                packed = super().state_dict()
            finally:
                self._state = shown
        return state_dicts.with_num_steps(packed, self.num_steps, self._steps)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes a state of ours or of `torch.optim.AdamW`. Weights are taken as they are: load them first.

        ConfigError, with nothing changed, when the state is of another model or another rule.
        """
        self.engine.require_loadable()
        self.follow_params()
        given = state_dicts.as_pre_hooks_make_it(self, state_dict)
        state, others = state_dicts.by_position(given)
        state_dicts.check(given["param_groups"], state, self._params)
        if self.engine.usable:
            self.wait()
        self.engine.drop_plan()
        with state_dicts.without_load_hooks(self):
            # torch's own loader would cast moments to the dtype of the weight.
            super().load_state_dict({"state": others, "param_groups": given["param_groups"]})
        with self.phases.within("checkpoint"):
            state_dicts.scatter(self.engine, self._params, state)
            self._steps = [int(state[i]["step"]) if i in state else 0 for i in range(len(self._params))]
            self._outcomes.forget()
            self._restate({self._params[i]: users_part(values) for i, values in state.items()})
            self._resume_at(state_dicts.num_steps_of(given, self._steps))
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

        keep: so many of the newest complete checkpoints stay.
        save_also: called with the folder that this rank's files are in; what it writes there becomes part of the
            checkpoint and goes with it, with a checksum of each file: the model's weights. ConfigError for anything
            but plain files and directories.

        PathFull when there is no room for it, or for what is flushed after it; CheckpointTaken when another run or
        optimizer saves there; CheckpointFailed when it cannot be written. Older checkpoints are then as they were, and
        training may go on.
        """
        self.wait()
        self._follow_until_stepped()
        return self._checkpoints.save(Target(directory, keep, save_also), self._small_state, self.num_steps)

    def begin_checkpoint(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 1,
        save_also: Callable[[Path], object] | None = None,
        memory_bytes: int | None = None,
    ) -> PendingCheckpoint:
        """As `save_checkpoint`, but what cannot be linked is copied by a thread while training goes on: what lies on
        other file systems, in host memory, on the device. Call `result()` on what it returns to wait.

        save_also: is called now, and training waits for it.
        memory_bytes: for copies of state that is not on a path, until it is written; None for half of the host memory
            that is free. What does not fit is written at once.

        The next checkpoint, `close` and the end of the process wait for it. CheckpointFailed is raised by `result`, or
        by the next `step`, checkpoint or `close`, when it cannot be completed. PathFull as in `save_checkpoint`.
        """
        self.wait()
        self._follow_until_stepped()
        target = Target(directory, keep, save_also)
        return self._checkpoints.begin(target, self._small_state, self.num_steps, memory_bytes)

    @torch.no_grad()
    def load_checkpoint(self, directory: str | os.PathLike[str] | Checkpoint, *, step: int | None = None) -> Checkpoint:
        """Takes the newest complete checkpoint in `directory`, or that of `step`, or one that was found. Load its
        weights first.

        Paths, split, stride and size of subgroups may be others than it was saved with. Checkpoints with a damaged
        manifest are left out, with a warning; asked for by `step`, they are an error that names the reason. Damage that
        only the data show is an error: an older state would not be that of the weights. `find_sound_checkpoint` finds
        it before.

        NoCheckpoint; FileDamaged when what `save_also` wrote is not as it was, ForeignState or WeightsMismatch for
        another model, other weights or another number of ranks, with nothing changed; another `StateFileError` for
        damage: when it is found in the data, this optimizer is not usable until a whole checkpoint is loaded.
        """
        self.engine.require_loadable()
        self.follow_params()
        if self.engine.usable:
            self.wait()
        found = self._checkpoints.find(directory, step)
        with Reader(found, self.engine.shards, Ranks.now()) as reader:
            small = reader.optimizer()
            self.engine.drop_plan()
            with state_dicts.without_load_hooks(self):
                super().load_state_dict({"state": small["state"], "param_groups": small["param_groups"]})
            self._checkpoints.take(found, reader)
            self._steps = list(small["steps"])
        self._outcomes.forget()
        self._restate({})
        self._resume_at(found.step)
        return found

    def _resume_at(self, num_steps: int) -> None:
        """Steps are counted on from here, by whoever tells of them, too."""
        self.num_steps = num_steps
        if self.attachment is not None:
            self.attachment.resumed()

    def _small_state(self) -> dict[str, Any]:
        return small_state(self, self._params, self._steps)

    @property
    def state(self) -> Any:
        """As torch's, for whoever walks it: see `OffloadedState`."""
        return self._state

    @state.setter
    def state(self, given: Mapping[Any, Any]) -> None:
        if "_state" not in self.__dict__:
            self._state = OffloadedState(self)
        self._state.replace(given)

    def read_state(self, param: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """All state of one parameter, brought from where it lives."""
        self.wait()
        self.engine.require_usable()
        self.engine.drop_plan()
        self.engine.weights.take_edited(reading=True)
        index = next(number for number, one in enumerate(self._params) if one is param)
        steps = [step if number == index else 0 for number, step in enumerate(self._steps)]
        return state_dicts.gather(self.engine, self._params, steps)[index]

    @torch.no_grad()
    def reset_state(self, params: Collection[torch.Tensor] | None) -> None:
        """The state of these parameters, of all with None, begins anew: as in an optimizer that is built now."""
        if "engine" not in self.__dict__ or not self.engine.usable:
            return
        self.wait()
        self.follow_params()
        self.engine.drop_plan()
        wanted = None if params is None else set(map(id, params))
        updated = {i for i, one in enumerate(self._params) if self._steps[i] and (wanted is None or id(one) in wanted)}
        state_dicts.reset(self.engine, updated)
        for number in updated:
            self._steps[number] = 0
        self._state.forget([self._params[number] for number in updated])

    def _show_state(self, param: int) -> None:
        self._state.show(self._params[param], state_dicts.names(self.engine, param))

    def _restate(self, users: Mapping[torch.Tensor, Mapping[str, Any]] | None = None) -> None:
        """`optimizer.state` as it is now; `users`: what a loaded state has of the user's."""
        self._state.begin(self._state.users(self._params) if users is None else users)
        for number, step in enumerate(self._steps):
            if step:
                self._show_state(number)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """torch calls this with loaded groups; those of older versions may lack keys. What a state holds beside that of
        parameters is there afterwards."""
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
        """Before the first step: device and engine are built anew when parameters are on another device, in another
        form, or others than when they were built. After it: when they are in other groups, removed or added, or some
        are exchanged for new ones. Whoever is about to use them calls it.

        ParameterError, with nothing changed, for anything else after the first step, and where what was done cannot
        go along.
        """
        params = [param for group in self.param_groups for param in group["params"]]
        moved = self._homes.first_moved(params) if self.engine.usable else None
        if moved is None:
            return
        fixed = self._has_stepped and not self._homes.can_be_regrouped(params)
        if fixed or any(isinstance(param, Part) for param in self._params):
            raise self._homes.refusal(self.param_groups, moved)
        self._build_anew(params, name_of(self.param_groups, moved))

    def _followed(self, param: int) -> int | None:
        """Follows the parameters: which number this one has from now on; None when it has left the groups."""
        whole = self._params[param]
        self.follow_params()
        if param < len(self._params) and self._params[param] is whole:
            return param
        return next((number for number, one in enumerate(self._params) if one is whole), None)

    def _follow_until_stepped(self) -> None:
        """What only reads state may go on after a step, wherever the parameters are."""
        if not self._has_stepped:
            self.follow_params()

    def _build_anew(self, params: list[torch.nn.Parameter], moved: str) -> None:
        """Engine and device for `params` as they are now; what was set, loaded, hooked and attached goes along."""
        self._outcomes.settle()
        regrouping = Regrouping(params, self._params)
        check_can_follow(self.engine, any(self._steps), moved, self._homes.are_reordered(params))
        claim(self, params)
        shards = [shard_of(param) for param in params]
        check_fits(shards, self.offload.accumulation)
        self.engine.drop_plan()
        state = regrouping.renumbered(carried(self.engine, self._params, self._steps))
        warn_of_removed(regrouping, self._steps)
        device = choose_device(self.offload, shards)
        try:
            self._checkpoints.finish()
            self.engine.close()
            engine = build_engine(params, self._layouts(), device, self.offload, self._effective(self.knobs))
            hand_over(self.engine, engine)
            give_up(self, [self._params[number] for number in regrouping.removed])
            self._use(params, device, engine, regrouping.steps(self._steps))
            self.check_knobs(self.knobs)
            self.apply_knobs(self.knobs)
            if state:
                state_dicts.scatter(engine, params, state)
            self._restate()
        except BaseException:
            with suppress(Exception):  # what is raised is why it cannot follow
                close_all(*([] if self.device is device else [device.close]), self.close)
            raise
        if not regrouping.changes_nothing and self.overlap is not None:
            self.overlap.rebuild()
        if self.attachment is not None:
            self.attachment.rebuild()

    def _use(self, params: list[torch.nn.Parameter], device: Device, engine: Engine, steps: list[int]) -> None:
        """They take the place of those that there were."""
        self._params, self._steps, self._homes = params, steps, Homes(params)
        self.device, self.engine = device, engine
        self._fruitless.watch(len(params))
        self._outcomes.engine = self._checkpoints.engine = engine
        self.phases.take_peak_bytes = device.take_peak_bytes
        engine.watch(self.gradient_arrived)

    # ---- life

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, also while training; MemoryBudgetError, with nothing changed, when their state does not fit."""
        check_group(param_group)
        if not hasattr(self, "engine"):
            super().add_param_group(param_group)
            check_distinct(self.param_groups[-1]["params"])
            return
        self.wait()
        self.engine.require_usable()
        self.follow_params()
        self.engine.drop_plan()
        super().add_param_group(param_group)
        try:
            params = self.param_groups[-1]["params"]
            check_distinct(params)
            check_one_place([shard_of(param) for param in (*self._params, *params)])
            layouts = self._layouts_of_added(params)
            self.engine.check(self.engine.effective, self.offload.headroom_bytes, layouts)
            claim(self, params, beside=self._params)
        except ConfigError:
            self.param_groups.pop()
            raise
        self._params += params
        self._steps += [0] * len(params)
        self._homes.extend(params)
        self._fruitless.watch(len(self._params))
        self.engine.extend(params, layouts)
        self.engine.stage()
        if self.overlap is not None:
            self.overlap.rebuild()
        if self.attachment is not None:
            self.attachment.extended()

    def _layouts(self) -> tuple[Layout, ...]:
        """The subgroups of all parameters in the groups."""
        shards = [[shard_of(param) for param in group["params"]] for group in self.param_groups]
        return cut(shards, self.offload.subgroup_numel)

    def _layouts_of_added(self, params: list[torch.nn.Parameter]) -> list[Layout]:
        """Their subgroups, numbered behind those that are there."""
        for index, param in enumerate(params, start=len(self._params)):
            check_param(shard_of(param), index)
        layouts = cut([[shard_of(param) for param in params]], self.offload.subgroup_numel)
        known = len(self.engine.layouts)
        return renumbered(layouts, subgroups=known, groups=len(self.param_groups) - 1, params=len(self._params))

    def close(self) -> None:
        """Stops lanes and telemetry and releases the parameters. The weights stay. Idempotent; nothing in a fork.

        Waits for a checkpoint that is still written, a Ctrl-C drops it; CheckpointFailed, when all is closed, if it
        could not be completed.
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
        close_all(
            *parts,
            lambda: self.engine.close(self._why_closed),
            lambda: give_up(self, self._params),
            self._checkpoints.close,
        )

    @property
    def is_mid_step(self) -> bool:
        """Closing it now would break a step, or lose gradients that are nowhere else."""
        gradients = self.engine.gradients
        held = gradients.any_released or gradients.any_set_aside or gradients.accumulating
        return self.engine.usable and (self._is_stepping or held)

    @property
    def is_of_this_process(self) -> bool:
        """It was not inherited by a fork."""
        return os.getpid() == self._pid

    def give_way(self) -> None:
        """Closes itself, because another one takes its parameters."""
        self._why_closed = "it was closed when another optimizer took its parameters"
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except CheckpointFailed:
            if kind is None:  # else it would hide what went wrong; it was logged
                raise
        except Exception:
            if kind is None:
                raise
            log.exception("the optimizer could not be closed as it should")

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "A Tidegate optimizer owns threads and buffers and cannot be copied or pickled; use state_dict()."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.__getstate__()
