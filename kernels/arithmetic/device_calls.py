"""Interfaces (protocols) of the GPU kernels (`GpuKernels`) and of their arguments (`Update`, `Gradient`). Arguments
describe arrays on the device by address. The agent has the classes that implement `Update` and `Gradient`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from tidegate.kernels.arithmetic.formats import GradDtype, WeightFormat


class Update(Protocol):
    """One update of `numel` elements. All addresses are on the same device. aux: for a 16-bit weight, the address of
    its fp32 master, or of the int16 remainder that together with a bf16 weight gives the master; 0 for fp32 weights.
    tensors: the addresses of the rule's state tensors. scalars: what the rule's implementation has made."""

    @property
    def numel(self) -> int: ...
    @property
    def weight(self) -> int: ...
    @property
    def weight_format(self) -> WeightFormat: ...
    @property
    def aux(self) -> int: ...
    @property
    def tensors(self) -> tuple[int, ...]: ...
    @property
    def grad(self) -> int: ...
    @property
    def grad_dtype(self) -> GradDtype: ...
    @property
    def scalars(self) -> Any: ...


class Gradient(Protocol):
    """The gradient of one parameter, on the device."""

    @property
    def address(self) -> int: ...
    @property
    def numel(self) -> int: ...
    @property
    def dtype(self) -> GradDtype: ...


class GpuKernels(Protocol):
    """The functions of GPU kernels: of a rule's Triton module, or of `TorchKernels`. They enqueue work on torch's
    current stream."""

    def update(self, runs: Sequence[Update]) -> None: ...

    def sum_of_squares(self, refs: Sequence[Gradient], out_sums: torch.Tensor, out_bad: torch.Tensor) -> None: ...
