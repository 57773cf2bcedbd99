"""DeepSpeed ZeRO-3 with CPU offload and one change: gradients are copied to host memory on a separate CUDA stream.

DeepSpeed 0.19.8 copies a gradient to the host, back, and as fp32 to the host again, in the stream that reduces
gradients, so that the next gradients wait. Here a gradient is converted to fp32 on the device and copied once, while
the backward continues; `step()` waits for the remaining copies. With it, benches can separate the gain of asynchronous
copies from the other gains of Tidegate.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch


class AsynchronousGradients:
    """Replaces `partition_grads` and `step` of one `DeepSpeedZeroOptimizer_Stage3`.

    Only for runs without gradient accumulation and without NVMe; `pin_memory` should be set. The weights are equal to
    DeepSpeed's bit for bit. Without CUDA the copies are synchronous, which is sufficient to test that equality.
    """

    def __init__(self, optimizer: Any) -> None:
        if not optimizer.offload_optimizer or optimizer.swap_optimizer:
            raise ValueError("asynchronous copies of gradients need offload_optimizer.device 'cpu'")
        self._optimizer, self._step = optimizer, optimizer.step
        self._copies = torch.cuda.Stream() if torch.cuda.is_available() else None
        optimizer.partition_grads, optimizer.step = self.partition_grads, self.step

    @torch.no_grad()
    def partition_grads(self, params: Sequence[Any], gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        zero = self._optimizer
        if zero.micro_step_id != 0 or not zero.is_gradient_accumulation_boundary():
            raise ValueError("asynchronous copies of gradients need gradient_accumulation_steps 1")
        for param, gradient in zip(params, gradients, strict=True):
            if param.partition_numel() * zero._get_param_partition_rank(param) < param.ds_numel:
                zero._offload_boundary_param_ids.add(param.ds_id)
                number = zero.get_param_id(param)
                subgroup, offset, _ = zero.grad_position[number]
                rounded = gradient.to(zero.gradient_accumulation_dtype)
                zero.norm_for_param_grads[number] = zero._constant_buffered_norm2(rounded)
                into = zero.fp32_partitioned_groups_flat[subgroup].grad.narrow(0, offset, rounded.numel())
                # The bucket that the gradient is in is used again before the copy has begun.
                self._copy(torch.empty_like(rounded, dtype=torch.float32).copy_(rounded), into)
            param.grad = None
        return []

    def _copy(self, gradient: torch.Tensor, into: torch.Tensor) -> None:
        if self._copies is not None:
            self._copies.wait_stream(torch.cuda.current_stream())
            gradient.record_stream(self._copies)
        with torch.cuda.stream(self._copies) if self._copies is not None else nullcontext():
            into.copy_(gradient.view_as(into), non_blocking=True)

    def step(self, *args: Any, **given: Any) -> Any:
        if self._copies is not None:
            self._copies.synchronize()
        return self._step(*args, **given)
