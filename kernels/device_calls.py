"""What a device's kernels are given: one update and one gradient, by address. agent/devices/base.py has the values."""

from __future__ import annotations

from typing import Protocol

from tidegate.kernels.scalars import GradDtype, Scalars, WeightFormat


class Update(Protocol):
    """One AdamW or Adam update of `numel` elements. All addresses are on the device; `aux` is 0 for F32."""

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
