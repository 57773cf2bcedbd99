"""Interface (protocol) of the GPU kernels, and its arguments: they describe arrays on the device by address."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tidegate.kernels.arithmetic.formats import GradDtype, WeightFormat


@dataclass(frozen=True, slots=True)
class Update:
    """Update of `numel` consecutive parameters with the same `scalars` (learning rate and so on), which the rule's
    implementation has made. `weight`, `aux`, `tensors` (the rule's state tensors) and `grad` are addresses on the same
    device. `aux`: the fp32 master of an fp16 weight, or the int16 remainder of a bf16 weight, which together with this
    weight gives the fp32 value; 0 for fp32 weights."""

    numel: int
    weight: int
    weight_format: WeightFormat
    aux: int
    tensors: tuple[int, ...]
    grad: int
    grad_dtype: GradDtype
    scalars: Any


@dataclass(frozen=True, slots=True)
class GradRef:
    """Location of one parameter's gradient on the device."""

    address: int
    numel: int
    dtype: GradDtype


class GpuKernels(Protocol):
    """The functions of GPU kernels: of a rule's Triton module, or of `TorchKernels`. They enqueue work on torch's
    current stream."""

    def update(self, runs: Sequence[Update]) -> None: ...

    def sum_of_squares(self, refs: Sequence[GradRef], out_sums: torch.Tensor, out_bad: torch.Tensor) -> None: ...
