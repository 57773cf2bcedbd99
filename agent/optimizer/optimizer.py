"""`tidegate.Optimizer`: a `torch.optim.Optimizer` with offloaded state, whose updates are planned and run by the
engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tidegate.agent.checkpoints.background import PendingCheckpoint
from tidegate.agent.checkpoints.checkpoint import Checkpoint
from tidegate.agent.checkpoints.optimizer_checkpoints import small_state
from tidegate.agent.checkpoints.reader import Reader
from tidegate.agent.checkpoints.writer import Target
from tidegate.agent.devices.selection import check_one_device
from tidegate.agent.interrupts import DelayInterrupt
from tidegate.agent.optimizer import state_dicts
from tidegate.agent.optimizer.engine_builder import layouts_of_added
from tidegate.agent.optimizer.hyperparameters import (
    LossScale,
    called_by_grad_scaler,
    check_group,
    check_max_grad_norm,
    defaults_of,
    gradient_factor,
    step_inputs,
)
from tidegate.agent.optimizer.offload import Offload
from tidegate.agent.optimizer.offloaded_optimizer import OffloadedOptimizer
from tidegate.agent.optimizer.state_view import user_entries
from tidegate.agent.parameters.ownership import claim
from tidegate.agent.parameters.shards import shard_of
from tidegate.agent.parameters.subgroups import check_distinct
from tidegate.agent.ranks import Ranks
from tidegate.errors import ConfigError
from tidegate.kernels import implementation
from tidegate.timeline.timeline import PhaseSpan


class Optimizer(OffloadedOptimizer):
    """An optimizer with offloaded state and any update rule. `AdamW` is the one with the rule "adamw".

    params: as in `torch.optim.Optimizer`: of any shape, in fp32, bf16 or fp16, all on one device.
    rule: name of the update rule, a module of `tidegate.rules`.
    maximize: updates the weights towards larger losses (flag; default False).
    max_grad_norm: clips the norm of all gradients to this limit, above 0; None: no clipping (norm; default None).
    offload: settings of offloading; None for all defaults (`Offload`; default None).
    hyperparameters: those of the rule, such as `lr`, and arguments of `torch.optim.AdamW`: `foreach` and `fused` are
        accepted and ignored; `amsgrad`, `capturable` and `differentiable` are refused unless False.

    Raises ParameterError if there are no parameters, or if one is sparse, shared or unsupported; ConfigError for other
    arguments that cannot work. Call `close()` at the end, or use the optimizer as a context manager.
    """

    _gradient_factor = staticmethod(gradient_factor)
    """Computes the factor for all gradients (loss scale and clipping). A subclass may round as another framework
    does."""

    def __init__(
        self,
        params: Iterable[Any],
        rule: str,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        offload: Offload | None = None,
        **hyperparameters: Any,
    ) -> None:
        check_max_grad_norm(max_grad_norm)
        found = implementation(rule)
        super().__init__(params, found, defaults_of(found.rule, {**hyperparameters, "maximize": maximize}), offload)
        self.max_grad_norm = max_grad_norm
        self.boundaries: list[Callable[[int], None]] = []
        """Functions that are called at the end of each `step()`, on all ranks, with the number of the next step. Knobs
        are changed in these calls."""

    # ---- training

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Does one update. `closure` re-evaluates the model and returns the loss, as in torch.

        Raises CheckpointFailed, once and before the update begins, if a checkpoint in the background could not be
        completed. With several ranks, the next checkpoint raises this error instead. Raises LaneStuckError if a part of
        the update takes longer than `watchdog_seconds`, and StateLost or NoPathLeft if storage paths fail.
        """
        self._checkpoints.raise_if_failed_alone()
        return self._step_guard.run(self._step, closure)

    def _step(self, closure: Callable[[], float] | None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.wait()
        self._follow_params()
        has_gradients = bool(self.engine.gradients.params_with_sums) or any(p.grad is not None for p in self._params)
        self._ineffective.observe_call(len(self._params), has_gradients)
        if not has_gradients:
            return loss
        loss_scale = LossScale.of(self)
        self.phases.enter("update")
        with DelayInterrupt():
            num_begun = self.engine.num_updates_begun
            try:
                self._step_results.run_update(lambda: self._update(loss_scale))
            except BaseException as error:
                if self.engine.num_updates_begun != num_begun:
                    self.engine.fail_uncounted_step(error)
                raise
            self._step_results.deliver(background=self._in_background)
            for boundary in tuple(self.boundaries):
                boundary(self.num_steps + 1)
        return loss

    def _update(self, loss_scale: LossScale) -> None:
        """Updates the weights with the engine, and counts the step."""
        with self.phases.exposed():
            inputs = step_inputs(
                self._implementation, self.param_groups, self._steps, loss_scale, self.max_grad_norm,
                self._gradient_factor,
            )  # fmt: skip
            had_stepped, self._has_stepped = self._has_stepped, True
            updated = self.engine.step(inputs)
            self._has_stepped = had_stepped or bool(updated)
            for param in updated:
                self._steps[param] += 1
                if self._steps[param] == 1:
                    self._refresh_state_entry(param)
            if updated:
                self._ineffective.observe_update(updated, self._params)
            self.phases.began_at(self.engine.gradients_made_at, before="backward")
            if not self._in_background:
                self._step_results.wait_for_step()
        self.num_steps += 1
        self.phases.enter("other")
        self._step_results.end_step()

    def _wait_for_weights(self, params: Collection[int]) -> None:
        """Makes the device wait for the update of `params` before it runs work that is enqueued after this call.
        `params`: numbers of parameters, counted through all `param_groups`."""
        if self.engine.running:
            with self.phases.exposed():
                self.engine.wait_for_weights(params)

    @property
    def num_skipped(self) -> int:
        """Steps that were skipped because gradients were not finite."""
        return self._ineffective.num_skipped

    @property
    def steps(self) -> tuple[int, ...]:
        """Number of updates of each parameter."""
        return tuple(self._steps)

    def _phases_so_far(self) -> tuple[PhaseSpan, ...]:
        """Phases of the steps that were not yet reported to the functions in `observers`, including the current phase
        up to now. May be called from any thread."""
        return self._step_results.phases_so_far()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Context manager for backward passes that are not the last of their step. Needed with gradients="release",
        where the gradients of a backward pass outside of it are taken as the final ones of the step."""
        before, self.gradient_source.accumulating = self.gradient_source.accumulating, True
        try:
            yield
        finally:
            self.gradient_source.accumulating = before

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler gives its scale to the optimizer instead of dividing all gradients by it. torch reads
        this attribute; it is True only for reads by a GradScaler (see `called_by_grad_scaler`)."""
        return called_by_grad_scaler()

    def log(self, *, loss: float | None = None, tokens: int | None = None) -> None:
        """Adds figures of the training loop to the metrics: loss and number of tokens of the next step."""
        self._step_results.log(loss, tokens)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets all gradients, as in torch. Sums of gradients on the host and gradients that were released are
        dropped, too.

        A running update keeps the gradients that it reads. With `set_to_none=False`, this call waits for the update.
        """
        if not set_to_none:
            self.wait()
        if not self.engine.running:
            self.engine.drop_plan(dropping=True)
            self.engine.gradients.forget()
        super().zero_grad(set_to_none)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Returns the state in torch's format: `step` (a scalar) and the tensors of the update rule (fp32) of each
        parameter that was updated. 16-bit weights also have `remainder` (int16, bits that complete bf16 to fp32) or
        `master` (fp32). All but `step` have the shape of the parameter.

        If steps were skipped, so that the number of steps is larger than every `step`, the additional key `num_steps`
        holds it.
        """
        self.wait()
        self._follow_before_first_step()
        self.engine.usability.require()
        self.engine.drop_plan()
        with self.phases.within("checkpoint"):
            self.engine.weights.adapt_to_edits(reading=True)
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
        """Loads a state of the same update rule, for AdamW also one of `torch.optim.AdamW`. Load the model's weights
        first: if 16-bit weights change later, their `remainder` or `master` is reset.

        Raises ConfigError, with nothing changed, if the state belongs to another model or another update rule.
        """
        self.engine.usability.require_loadable()
        self._follow_params()
        given = state_dicts.apply_load_pre_hooks(self, state_dict)
        state, others = state_dicts.by_position(given)
        state_dicts.check(self.rule, given["param_groups"], state, self._params)
        num_steps = state_dicts.total_steps(given, [])
        if self.engine.usable:
            self.wait()
        self.engine.drop_plan()
        with DelayInterrupt():
            with state_dicts.without_torch_load_hooks(self):
                # torch's own loader would cast state to the dtype of the weight.
                super().load_state_dict({"state": others, "param_groups": given["param_groups"]})
            with self.phases.within("checkpoint"), self.engine.usability.replacing_state():
                state_dicts.scatter(self.engine, self._params, state)
                self._steps = [int(state[i]["step"]) if i in state else 0 for i in range(len(self._params))]
                self._step_results.forget()
                keys = state_dicts.dtypes(self.rule)
                self._rebuild_state_view({self._params[i]: user_entries(given, keys) for i, given in state.items()})
                self._set_num_steps(max([num_steps, *self._steps]))
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _follow_before_first_step(self) -> None:
        """Before the first update, adapts the engine to parameters that were moved, converted or replaced (see
        `_follow_params`). Does nothing after the first update: state can be read then even if parameters were moved."""
        if not self._has_stepped:
            self._follow_params()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by torch: sets loaded param groups, adds the keys that groups of older versions lack, and sets the
        entries of the state that belong to no parameter."""
        given = dict(state)
        others = given.pop("state", {})
        super().__setstate__(given)
        self._state.take_others(others)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    # ---- checkpoints

    def save_checkpoint(
        self, directory: str | os.PathLike[str], *, keep: int = 1, save_also: Callable[[Path], object] | None = None
    ) -> Checkpoint:
        """Writes the checkpoint `directory/step-<n>` without gathering the state in memory. All ranks must call this,
        with a directory that all of them can access.

        keep: number of complete checkpoints that are kept, the newest ones; at least 1 (count; default 1).
        save_also: function that is called with the folder of this rank's files. Files that it writes there, such as the
            model's weights, become part of the checkpoint, with a checksum of each, and are deleted with it.

        Raises ConfigError if `directory` is an address such as s3://…, or if `save_also` writes anything but plain
        files and directories; PathFull if there is no space for the checkpoint
        or for state that is flushed after it; CheckpointTaken if another run or optimizer saves there; CheckpointFailed
        if the checkpoint cannot be written. Older checkpoints are unchanged after an error, and training may continue.
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
        """Writes the checkpoint `directory/step-<n>` while training continues: a thread copies the state that cannot be
        hard-linked. `result()` of the returned object waits for the end. All ranks must call this.

        directory, keep: as in `save_checkpoint`.
        save_also: as in `save_checkpoint`; it is called at once, before this method returns.
        memory_bytes: host memory for copies of state that is not on a path, until they are written; None for half of
            the free host memory. State that does not fit is written at once (bytes; default None).

        The next checkpoint, `close` and the end of the process wait for this checkpoint. If it cannot be completed,
        `result`, or the next `step`, checkpoint or `close`, raises CheckpointFailed. Raises ConfigError and PathFull
        for the same reasons as `save_checkpoint`.
        """
        self.wait()
        self._follow_before_first_step()
        target = Target(directory, keep, save_also)
        return self._checkpoints.begin(target, self._small_state, self.num_steps, memory_bytes)

    @torch.no_grad()
    def load_checkpoint(self, directory: str | os.PathLike[str] | Checkpoint, *, step: int | None = None) -> Checkpoint:
        """Loads the newest complete checkpoint in `directory`, the one of step number `step` if it is given, or the
        given `Checkpoint`. Load the weights of the checkpoint first.

        Paths, split, stride and size of subgroups may differ from those at saving. Checkpoints with a damaged manifest
        are skipped with a warning; if `step` names such a checkpoint, an error gives the reason. Damage in the data is
        an error, because an older state would not match the weights; `find_sound_checkpoint` finds such damage first.

        Raises ConfigError for an address such as s3://…; NoCheckpoint if there is none; FileDamaged if files of
        `save_also` have changed; ForeignState or WeightsMismatch for another model, other weights or another number of
        ranks: nothing is changed then. Raises another `StateFileError` for other damage. If this damage is found in the
        data, the optimizer is not usable until a complete checkpoint is loaded.
        """
        self.engine.usability.require_loadable()
        self._follow_params()
        if self.engine.usable:
            self.wait()
        found = self._checkpoints.find(directory, step)
        with Reader(found, self.engine, Ranks.current()) as reader:
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

    # ---- param groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group, as in torch; also during training.

        param_group: `params`, of the shapes and dtypes that the constructor takes, and hyperparameters of this group.

        Raises, with nothing changed, MemoryBudgetError if the additional state does not fit, ParameterError for
        parameters that cannot be optimized, and ConfigError for other values that cannot work.
        """
        check_group(self.rule, param_group)
        if not hasattr(self, "engine"):
            super().add_param_group(param_group)
            check_distinct(self.param_groups[-1]["params"])
            return
        self.wait()
        self.engine.usability.require()
        self._follow_params()
        self.engine.drop_plan()
        with DelayInterrupt():
            self._add_param_group(param_group)

    def _add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            params = self.param_groups[-1]["params"]
            check_distinct(params)
            check_one_device([shard_of(param) for param in (*self._params, *params)])
            layouts = layouts_of_added(params, len(self._params), self.param_groups, self.engine, self.offload)
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
