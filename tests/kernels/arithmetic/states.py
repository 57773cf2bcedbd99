"""States of an update to compare: ordinary ones, special ones, the oracle's result, and equality of bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from tidegate.kernels import GradDtype, WeightFormat
from tidegate.kernels.adamw import oracle as adamw_oracle
from tidegate.kernels.adamw.scalars import Arithmetic, Scalars
from tidegate.kernels.arithmetic import oracle
from tidegate.kernels.arithmetic.device_calls import Update
from tidegate.kernels.deepspeed_adamw import oracle as deepspeed_oracle

Array = np.ndarray[Any, Any]

# bits of fp32: zeros, denormals, exact ties of bf16 and fp16, carries into the next exponent and into infinity, NaN
SPECIAL = [
    *(0x00000000, 0x00000001, 0x00007FFF, 0x00008000, 0x007FFFFF, 0x00800000, 0x33000000, 0x33000001, 0x387FE000),
    *(0x3F800000, 0x3F808000, 0x3F818000, 0x3F801000, 0x3F803000, 0x3FFFFFFF, 0x3FFF8000, 0x477FEFFF, 0x477FF000),
    *(0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x40490FDB, 0x2B8CBCCC),
]
SPECIAL_F32 = np.array([*SPECIAL, *(bits | 0x80000000 for bits in SPECIAL)], np.uint32).view(np.float32)
SPECIAL_F16 = np.array([0x0000, 0x0001, 0x03FF, 0x0400, 0x3C00, 0x3555, 0x7BFF, 0x7C00, 0x7C01, 0x7E00], np.uint16)


@dataclass
class State:
    """The arrays of one update."""

    weight: Array
    aux: Array | None
    exp_avg: Array
    exp_avg_sq: Array
    grad: Array

    def copy(self) -> State:
        return State(*(None if a is None else a.copy() for a in self.arrays()))

    def arrays(self) -> Iterator[Array | None]:
        return (getattr(self, field.name) for field in fields(self))

    def slice(self, part: slice) -> State:
        return State(*(None if a is None else a[part] for a in self.arrays()))


def make(master: Array, exp_avg: Array, exp_avg_sq: Array, grad: Array, weight_format: WeightFormat) -> State:
    """A state whose arrays all begin one element after an aligned address."""
    weight, aux = master.copy(), None
    if weight_format is WeightFormat.BF16_REMAINDER:
        weight, aux = oracle.split_bf16(master)
    elif weight_format is not WeightFormat.F32:
        weight = oracle.to_f16(master) if weight_format is WeightFormat.F16_MASTER else oracle.to_bf16(master)
        aux = master.copy()
    arrays = (weight, aux, exp_avg, exp_avg_sq, grad)
    return State(*(None if a is None else np.concatenate([a[:1], a])[1:] for a in arrays))


def ordinary(numel: int, weight_format: WeightFormat, grad_dtype: GradDtype, seed: int = 0) -> State:
    rng = np.random.default_rng(seed)
    master, exp_avg, grad = (rng.standard_normal((3, numel)) * [[0.02], [1e-3], [1e-2]]).astype(np.float32)
    return make(master, exp_avg, np.square(exp_avg), as_grad(grad, grad_dtype), weight_format)


def special(weight_format: WeightFormat, grad_dtype: GradDtype) -> State:
    """Every special weight with every special gradient and moment."""
    grads = as_grad(SPECIAL_F32, grad_dtype)
    if grad_dtype is GradDtype.F16:
        grads = np.concatenate([SPECIAL_F16, SPECIAL_F16 | 0x8000]).view(np.float16)
    moments = np.array([0.0, -0.0, 1e-40, 0.5, np.inf, np.nan, 3e38], np.float32)
    master, grad, moment = (axis.ravel() for axis in np.meshgrid(SPECIAL_F32, grads, moments))
    return make(master, moment, np.abs(moment), grad, weight_format)


def of(arithmetic: Arithmetic, values: Scalars) -> Scalars:
    """These scalars, which were made for TORCH, with another arithmetic."""
    if arithmetic is Arithmetic.TORCH:
        return values
    return replace(values, arithmetic=arithmetic, decay=float(np.float32(1) - np.float32(values.decay)))


def as_grad(values: Array, dtype: GradDtype) -> Array:
    if dtype is GradDtype.F32:
        return values
    return oracle.to_bf16(values) if dtype is GradDtype.BF16 else oracle.to_f16(values)


def by_oracle(s: State, weight_format: WeightFormat, grad_dtype: GradDtype, values: Scalars) -> None:
    update = adamw_oracle.update if values.arithmetic is Arithmetic.TORCH else deepspeed_oracle.update
    update(s.weight, weight_format, s.aux, (s.exp_avg, s.exp_avg_sq), s.grad, grad_dtype, values)


def canonical(array: Array, is_bf16: bool) -> Array:
    """The bits, with one NaN for all: sign and payload of a NaN are not part of the contract."""
    numbers = oracle.from_bf16(array) if is_bf16 else array
    bits = array.view(f"u{array.itemsize}")
    return np.where(np.isnan(numbers), bits.dtype.type(-1 % 2 ** (8 * array.itemsize)), bits)


def assert_same(a: State, b: State) -> None:
    for field, x, y in zip(fields(State), a.arrays(), b.arrays(), strict=True):
        if x is None or y is None:
            assert x is y
            continue
        is_bf16 = field.name == "weight" and x.dtype == np.uint16
        np.testing.assert_array_equal(canonical(x, is_bf16), canonical(y, is_bf16), err_msg=field.name)


def run_of(s: State, weight_format: WeightFormat, grad_dtype: GradDtype, values: Scalars) -> Update:
    weight, aux, exp_avg, exp_avg_sq, grad = (0 if a is None else a.ctypes.data for a in s.arrays())
    return Update(len(s.weight), weight, weight_format, aux, (exp_avg, exp_avg_sq), grad, grad_dtype, values)
