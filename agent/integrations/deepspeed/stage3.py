"""ZeRO-3 optimizer that uses Tidegate's engine. Partitioning, communication and loss scale are DeepSpeed's; state,
gradients once they are reduced, the update and all swapping are Tidegate's.

Each parameter's partition on this rank is a parameter of a `tidegate.Optimizer`, in the memory of DeepSpeed's flat
buffers. Where DeepSpeed reads or writes the whole fp32 state (checkpoints), it temporarily gets tensors in its own
layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.stage3 import OPTIMIZER_STEP_TIMER, DeepSpeedZeroOptimizer_Stage3

from tidegate.agent.integrations.deepspeed import state as states
from tidegate.agent.integrations.deepspeed.norm import ZeroRoundedOptimizer
from tidegate.agent.integrations.deepspeed.state import MOMENTS, FlatPosition, FlatState
from tidegate.agent.integrations.deepspeed.vectors import vector_numel
from tidegate.agent.optimizer.offload import Offload
from tidegate.agent.optimizer.optimizer import Optimizer
from tidegate.agent.parameters.shards import LocalShard
from tidegate.agent.ranks import Ranks
from tidegate.errors import ConfigError

HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay")
"""Hyperparameters that schedulers and users may change in DeepSpeed's param groups during training."""


def is_decoupled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an Adam of DeepSpeed or torch uses decoupled weight decay (AdamW)."""
    own = getattr(optimizer, "adam_w_mode", None)
    return isinstance(optimizer, torch.optim.AdamW) if own is None else bool(own)


class TidegateZeroOptimizer(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """ZeRO-3 optimizer that replaces its base class where the configuration has a `"tidegate"` block. `tidegate`: the
    `tidegate.Optimizer` inside, for example for `tidegate.attach`."""

    tidegate: Optimizer

    def __init__(self, offload: Offload, module: Any, init_optimizer: Any, *args: Any, **given: Any) -> None:
        self._offload = offload
        self._flats: list[FlatState] | None = None
        super().__init__(module, init_optimizer, *args, **given)

    # ---- construction

    def _configure_offloading(self, offload_optimizer_config: Any, offload_param_config: Any) -> None:
        super()._configure_offloading(offload_optimizer_config, offload_param_config)
        # These settings mean state in host memory: DeepSpeed then creates no state, and keeps no gradients of its own.
        self.offload_optimizer = True
        self.swap_optimizer = self.offload_optimizer_pin_memory = False
        self.partial_offload = 1.0

    def _create_fp32_partitions(self) -> None:
        self._positions: list[FlatPosition] = []
        self._numbers: dict[int, int] = {}
        """Number of this rank's part of each parameter, by DeepSpeed's `ds_id` of the parameter."""
        by_group: dict[int, list[LocalShard]] = defaultdict(list)
        is_cpu_adam = isinstance(self.optimizer, DeepSpeedCPUAdam)
        vector = vector_numel(self.optimizer.ds_opt_adam) if is_cpu_adam else 1
        for subgroup, params in enumerate(self.fp16_groups):
            flat, offset = self.fp16_partitioned_groups_flat[subgroup], 0
            tail_begins = flat.numel() - flat.numel() % vector
            for param in params:
                numel = param.partition_numel()
                tail = min(max(offset + numel - tail_begins, 0), numel)
                part = LocalShard(flat.narrow(0, offset, numel), self._groups_of(param), tail, subgroup)
                if part.dtype != self.gradient_accumulation_dtype:
                    part.grad_dtype = self.gradient_accumulation_dtype
                self._numbers[param.ds_id] = len(self._positions)
                self._positions.append(FlatPosition(subgroup, offset, numel))
                by_group[self.sub_group_to_group_id[subgroup]].append(part)
                offset += numel
        self._sources = list(by_group)
        """For each param group of Tidegate's optimizer, the number of the DeepSpeed param group that it was made
        from."""
        self.tidegate = ZeroRoundedOptimizer(
            [{"params": by_group[source], **self._hyperparameters(source)} for source in self._sources],
            "deepspeed_adamw" if is_cpu_adam else "adamw", decoupled_weight_decay=is_decoupled(self.optimizer),
            max_grad_norm=self.clip_grad or None, offload=self._offload,
        )  # fmt: skip
        self._parts: list[LocalShard] = [part for parts in by_group.values() for part in parts]
        assert self._sources == sorted(self._sources), "DeepSpeed makes subgroups param group by param group"
        self._drop_flats()
        for group in self.optimizer.param_groups:
            group["params"] = []

    def _groups_of(self, param: Any) -> tuple[Any, ...]:
        group = self._get_param_partition_group(param)
        return (group,) if dist.get_world_size(group=group) > 1 else ()

    def _hyperparameters(self, source: int) -> dict[str, Any]:
        return {name: self.optimizer.param_groups[source][name] for name in HYPERPARAMETERS}

    def _setup_for_real_optimizer(self) -> None:
        self._create_fp32_partitions()
        self._create_next_swappable_fp32_groups()
        if self.contiguous_gradients:
            for dtype, bucket in self.ipg_buckets.items():
                bucket.buffer = torch.empty(
                    self.reduce_bucket_size, dtype=dtype, device=get_accelerator().current_device_name()
                )
        dist.barrier()

    def destroy(self) -> None:
        """Destroys DeepSpeed's optimizer and closes the engine."""
        super().destroy()
        self.tidegate.close()

    # ---- gradients

    @torch.no_grad()
    def partition_grads(self, params_to_release: Sequence[Any], grad_partitions: Sequence[torch.Tensor]) -> None:
        """Takes over this rank's gradients when a bucket is reduced, and frees `.grad` of the whole parameters.
        `grad_partitions`: this rank's part of each gradient."""
        last = self.is_gradient_accumulation_boundary()
        for param, gradient in zip(params_to_release, grad_partitions, strict=True):
            if param.partition_numel() * self._get_param_partition_rank(param) < param.ds_numel:
                self._take_gradient(self._numbers[param.ds_id], gradient, last)
            if param.grad is not None and not get_accelerator().is_synchronized_device():
                param.grad.record_stream(get_accelerator().current_stream())
            param.grad = None

    def _take_gradient(self, number: int, gradient: torch.Tensor, last: bool) -> None:
        """Adds this rank's part of a gradient to its sum; copies the first of a step, as DeepSpeed reuses its buffer.
        `number`: number of the part in `tidegate`. `last`: whether this backward completes the sum."""
        part = self._parts[number]
        if self.micro_step_id == 0 or part.grad is None:
            own = gradient.new_zeros(part.numel(), dtype=self.gradient_accumulation_dtype)
            own[: gradient.numel()] = gradient.view(-1)
            part.grad = own
        else:
            part.grad[: gradient.numel()] += gradient.view(-1).to(part.grad.dtype)
        with nullcontext() if last else self.tidegate.accumulate():
            if last or self._offload.accumulation != "device":
                self.tidegate._gradient_arrived(number)

    def _finalize_offload_gradient_accumulation(self) -> None:
        """Does nothing, unlike DeepSpeed's method: the engine uses the accumulated gradients when the step begins."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, accumulated ones included."""
        super().zero_grad(set_to_none)
        self.tidegate.zero_grad()

    def _gradient_of(self, param: Any) -> torch.Tensor:
        """This rank's part of a parameter's gradient, created with zeros if the backward computed none. ConfigError
        with gradients="release"."""
        if self._offload.gradients == "release":
            raise ConfigError(
                'With gradients="release" each gradient is released as soon as it arrives, so that it cannot be read '
                'or set. Use gradients="keep".'
            )
        part = self._parts[self._numbers[param.ds_id]]
        if part.grad is None:
            part.grad = torch.zeros_like(part, dtype=self.gradient_accumulation_dtype)
        return part.grad

    def _get_fp32_grad_state_partition(self, param: Any, release_swap_buffers: bool) -> tuple[torch.Tensor, int]:
        self._await_reduction()
        gradient = self._gradient_of(param)
        return gradient, self._position_of(param).subgroup

    def set_fp32_grad_for_param(self, value: torch.Tensor, param: Any) -> None:
        if param.requires_grad:
            self._set_gradient(param, self._own_slice(value, param))

    def set_local_grad_for_param(self, value: torch.Tensor, param: Any) -> None:
        if param.requires_grad:
            self._set_gradient(param, value.flatten())

    def update_fp32_grad_for_param_vectorized(
        self, update_func: Callable[[torch.Tensor, Any], torch.Tensor], param_list: Sequence[Any]
    ) -> None:
        for param in param_list:
            if param.requires_grad:
                self.set_fp32_grad_for_param(update_func(self.get_fp32_grad_for_param(param), param), param)

    @torch.no_grad()
    def _set_gradient(self, param: Any, values: torch.Tensor) -> None:
        self._await_reduction()
        self._gradient_of(param)[: values.numel()].copy_(values)

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, torch.Tensor]]:
        self._await_reduction()
        return {
            subgroup: {i: self._gradient_of(param).float() for i, param in enumerate(params)}
            for subgroup, params in enumerate(self.fp16_groups)
        }

    def complete_grad_norm_calculation_for_cpu_offload(self, params: Sequence[Any]) -> torch.Tensor:
        """Norm over all ranks of the present gradients of these parameters. DeepSpeed's method would use norms that it
        stored when the gradients arrived. ConfigError with gradients="release"."""
        self._await_reduction()
        for param in params:
            self.norm_for_param_grads[self.get_param_id(param)] = self._gradient_of(param).float().norm()
        found: torch.Tensor = super().complete_grad_norm_calculation_for_cpu_offload(params)
        return found

    def _await_reduction(self) -> None:
        if not get_accelerator().resolves_data_dependency():
            self.reduce_and_partition_stream.synchronize()

    # ---- a step

    def step(self, closure: None = None) -> None:
        """Updates all parameters once. The update is skipped on all ranks if gradients are not finite on any rank."""
        self._pre_step()
        self._partition_all_parameters()
        self._await_reduction()
        self.timers(OPTIMIZER_STEP_TIMER).start()
        self._complete_gradients()
        self._take_hyperparameters()
        self.tidegate.step()
        outcome = self.tidegate.engine.last_outcome
        assert outcome is not None, "every part has a gradient"
        self.overflow = outcome.skipped
        norm = outcome.grad_norm
        if self._loss_scale_update_and_overflow_cleanup():
            self.timers(OPTIMIZER_STEP_TIMER).stop()
            return
        self._global_grad_norm = torch.tensor(norm, dtype=torch.float32)
        self.tidegate.zero_grad()
        self.timers(OPTIMIZER_STEP_TIMER).stop()
        self._post_step({OPTIMIZER_STEP_TIMER})

    def _take_hyperparameters(self) -> None:
        present = [self._hyperparameters(source) for source in self._sources]
        several_betas = len({tuple(map(float, given["betas"])) for given in present}) > 1
        for group, given in zip(self.tidegate.param_groups, present, strict=True):
            group |= {**given, "several_betas": several_betas}
        self.tidegate.max_grad_norm = self.clip_grad or None
        self.tidegate.grad_scale = self.loss_scale  # type: ignore[attr-defined]

    def _complete_gradients(self) -> None:
        """Sets missing gradients to zeros, because DeepSpeed always updates all parameters of a subgroup."""
        waiting = self.tidegate.engine.gradients.params_with_sums
        for number, part in enumerate(self._parts):
            if part.grad is None and number not in waiting:
                part.grad = torch.zeros_like(part, dtype=self.gradient_accumulation_dtype)

    # ---- state of one parameter

    def _position_of(self, param: Any) -> FlatPosition:
        return self._positions[self._numbers[param.ds_id]]

    def _get_fp32_opt_state_partition(
        self, param: Any, release_swap_buffers: bool, optim_state_key: str | None = None
    ) -> tuple[torch.Tensor, int]:
        self._await_reduction()
        number = self._numbers[param.ds_id]
        return states.read_part(self.tidegate, number, optim_state_key), self._positions[number].subgroup

    def set_full_hp_param(self, value: torch.Tensor, param: Any, optim_state_key: str | None = None) -> None:
        if param.requires_grad:
            if value.numel() != param.ds_numel:
                raise ConfigError(
                    f"The value has {value.numel()} elements, but the parameter has "
                    f"{param.ds_numel}: the numbers must match."
                )
            self._set_state(param, optim_state_key, self._own_slice(value, param))
            if optim_state_key is None and param.ds_status == ZeroParamStatus.AVAILABLE:
                # For parameters that are gathered now, or always because they are small.
                param.data.copy_(states.rounded(value, param.dtype).view(param.data.shape))

    def set_local_hp_param(self, value: torch.Tensor, param: Any, optim_state_key: str | None = None) -> None:
        if param.requires_grad:
            if value.numel() != param.ds_tensor.numel():
                raise ConfigError(
                    f"The value has {value.numel()} elements, but this rank's part of the parameter has "
                    f"{param.ds_tensor.numel()}: the numbers must match."
                )
            self._set_state(param, optim_state_key, value.flatten())

    def _set_state(self, param: Any, name: str | None, values: torch.Tensor) -> None:
        number = self._numbers[param.ds_id]
        whole = states.read_part(self.tidegate, number, name)
        whole[: values.numel()] = values
        states.write_part(self.tidegate, number, name, whole)

    def _own_slice(self, value: torch.Tensor, param: Any) -> torch.Tensor:
        """This rank's slice of the full value of a parameter, without padding."""
        numel, flat = param.partition_numel(), value.flatten()
        start = min(numel * self._get_param_partition_rank(param), flat.numel())
        return flat[start : min(start + numel, flat.numel())]

    # ---- the whole state in DeepSpeed's layout

    def _flat_sizes(self) -> list[int]:
        """Number of elements of each DeepSpeed subgroup on this rank."""
        return [int(numel) for numel in self.fp16_partitioned_groups_flat_numel]

    def _drop_flats(self) -> None:
        """Frees the tensors in DeepSpeed's layout. DeepSpeed sees an empty optimizer state until they are created
        again."""
        self._flats = None
        self.optimizer.state.clear()
        self.fp32_partitioned_groups_flat = [torch.empty(0, device="cpu") for _ in self.fp16_groups]

    @contextmanager
    def _deepspeed_layout(self, *, with_state: bool, load_at_end: bool) -> Iterator[None]:
        """Context manager in which DeepSpeed's fp32 weights and optimizer state exist in host memory. `with_state`:
        fills them with the engine's state first. `load_at_end`: loads them into the engine after the block."""
        sizes = self._flat_sizes()
        states.require_host_memory(sum(sizes), Ranks.current())
        steps = self._steps_by_subgroup()
        self._flats = [
            FlatState(
                torch.zeros(n, device="cpu"),
                {name: torch.zeros(n, device="cpu") for name in MOMENTS} if with_state and step else {},
            )
            for n, step in zip(sizes, steps, strict=True)
        ]
        self.fp32_partitioned_groups_flat = [flat.master for flat in self._flats]
        try:
            if with_state:
                states.read_all(self.tidegate, self._positions, self._flats)
                self._fill_state(steps)
            yield
            if load_at_end:
                loaded = [self.optimizer.state.get(flat.master, {}) for flat in self._flats]
                moments = [{name: state[name] for name in MOMENTS if name in state} for state in loaded]
                states.write_all(
                    self.tidegate,
                    self._positions,
                    [FlatState(flat.master.detach(), given) for flat, given in zip(self._flats, moments, strict=True)],
                    [int(state.get("step", 0)) for state in loaded],
                )
        finally:
            self._drop_flats()

    def _fill_state(self, steps: Sequence[int]) -> None:
        count_as_tensor = isinstance(self.optimizer, torch.optim.Adam)
        for flat, step in zip(self._flats or (), steps, strict=True):
            flat.master.requires_grad_(True)  # as in DeepSpeed, whose checkpoint loaders copy this flag
            if step:
                own_step = torch.tensor(float(step), device="cpu") if count_as_tensor else step
                self.optimizer.state[flat.master] = {"step": own_step, **flat.moments}

    def _steps_by_subgroup(self) -> list[int]:
        steps = [0] * len(self.fp16_groups)
        for position, step in zip(self._positions, self.tidegate.steps, strict=True):
            steps[position.subgroup] = step
        return steps

    def _rigid_state_dict(self) -> dict[str, Any]:
        with self._deepspeed_layout(with_state=True, load_at_end=False):
            found: dict[str, Any] = super()._rigid_state_dict()
            return found

    def _rigid_load_state_dict(self, state_dict: dict[str, Any], load_optimizer_states: bool = True) -> None:
        states.check_sizes([int(tensor.numel()) for tensor in state_dict["fp32_flat_groups"]], self._flat_sizes())
        with self._deepspeed_layout(with_state=not load_optimizer_states, load_at_end=True):
            super()._rigid_load_state_dict(state_dict, load_optimizer_states)

    def _load_universal_checkpoint(
        self, checkpoint_folder: str, load_optimizer_states: bool, load_from_fp32_weights: bool
    ) -> None:
        with self._deepspeed_layout(with_state=not load_optimizer_states, load_at_end=True):
            super()._load_universal_checkpoint(checkpoint_folder, load_optimizer_states, load_from_fp32_weights)

    def _restore_from_bit16_weights(self) -> None:
        """Sets the fp32 weights to the present 16-bit weights."""
        if self._flats is not None:
            super()._restore_from_bit16_weights()
            return
        self.tidegate.wait()
        self.tidegate.engine.drop_plan()
        self.tidegate.engine.weights.reset()

    def reset_swap_buffers(self) -> None:
        """Does nothing: Tidegate stores the state, so that DeepSpeed has no swap buffers to reset."""

    # ---- unsupported operations

    def offload_states(self, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError("offload_states cannot move the state that Tidegate holds: set static_ratio to 0 instead.")

    def reload_states(self, *_: Any, **__: Any) -> NoReturn:
        self.offload_states()
