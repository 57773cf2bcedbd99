"""Formats of weights and gradients, and rounding of numbers to fp32."""

from __future__ import annotations

import ctypes
from enum import IntEnum


class WeightFormat(IntEnum):
    """The storage format of a weight and its auxiliary array (`aux`). The numbers are those of
    kernels/src/formats.h."""

    F32 = 0
    """fp32, its own master; no aux."""
    BF16_REMAINDER = 1
    """bf16 and a signed 16-bit remainder: together the fp32 master."""
    F16_MASTER = 2
    """fp16, rounded to nearest even from an fp32 master."""
    BF16_MASTER = 3
    """bf16, rounded to nearest with ties away from zero from an fp32 master."""

    @property
    def weight_bytes(self) -> int:
        return 4 if self is WeightFormat.F32 else 2

    @property
    def aux_bytes(self) -> int:
        return (0, 2, 4, 4)[self]


class GradDtype(IntEnum):
    """The dtype of a gradient."""

    F32 = 0
    BF16 = 1
    F16 = 2

    @property
    def nbytes(self) -> int:
        return 4 if self is GradDtype.F32 else 2


def to_f32(value: float) -> float:
    """The fp32 value nearest to `value`; infinite when it is out of range."""
    return ctypes.c_float(value).value
