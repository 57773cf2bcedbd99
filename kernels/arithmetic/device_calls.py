"""Interfaces (protocols) of the GPU kernels (`GpuKernels`) and of their arguments (`Update`, `Gradient`). Arguments
describe arrays on the device by address. The agent has the classes that implement `Update` and `Gradient`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from tidegate.kernels.arithmetic.scalars import GradDtype, Scalars, WeightFormat


class Update(Protocol):
    """One AdamW or Adam update of `numel` elements. All addresses are on the device. aux: for a 16-bit weight, the
    address of its fp32 master, or of the int16 remainder that together with a bf16 weight gives the master; 0 for
    fp32 weights."""

    @property
    def numel(self) -> int: ...
    @property
    def weight(self) -> int: ...
    @property
    def weight_format(self) -> WeightFormat: ...
    @property
    def aux(self) -> int: ...
    @property
    def exp_avg(self) -> int: ...
    @property
    def exp_avg_sq(self) -> int: ...
    @property
    def grad(self) -> int: ...
    @property
    def grad_dtype(self) -> GradDtype: ...
    @property
    def scalars(self) -> Scalars: ...


class Gradient(Protocol):
    """The gradient of one parameter, on the device."""

    @property
    def address(self) -> int: ...
    @property
    def numel(self) -> int: ...
    @property
    def dtype(self) -> GradDtype: ...


class GpuKernels(Protocol):
    """The functions of a module of GPU kernels (`triton_adamw`, `torch_adamw`). They enqueue work on torch's current
    stream."""

    def update(self, runs: Sequence[Update]) -> None: ...

    def sum_of_squares(self, refs: Sequence[Gradient], out_sums: torch.Tensor, out_bad: torch.Tensor) -> None: ...


@contextmanager
def on_stream(stream: int | None) -> Iterator[None]:
    """Context manager in which the CUDA stream with the handle `stream` is torch's current stream. None: the current
    stream does not change."""
    if stream is None:
        yield
    else:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            yield
