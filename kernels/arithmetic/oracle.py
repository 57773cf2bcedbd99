"""Reference implementation of the kernels in NumPy: the specification that every kernel must equal bit for bit.

bf16 is stored as uint16 bits; fp16 is float16. Operations are + − × ÷ √ and, where DeepSpeed uses it, fused
multiply-add; each is rounded once, in the order written here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tidegate.kernels.arithmetic.scalars import SCALAR_NAMES, Arithmetic, GradDtype, Scalars, WeightFormat

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
U16 = npt.NDArray[np.uint16]
I16 = npt.NDArray[np.int16]

BLOCK_NUMEL = 65536
NUM_ACCUMULATORS = 16


def split_bf16(values: F32) -> tuple[U16, I16]:
    """Splits fp32 into bf16 (nearest, ties away from zero) and the signed 16-bit remainder of its bits."""
    bits = values.view(np.uint32)
    nan = np.isnan(values)
    hi = np.where(nan, bits >> 16 | 0x40, (bits.astype(np.uint64) + 0x8000) >> 16).astype(np.uint16)
    lo = np.where(nan, 0, bits.astype(np.int64) - (hi.astype(np.int64) << 16)).astype(np.int16)
    return hi, lo


def join_bf16(hi: U16, lo: I16) -> F32:
    """The fp32 values from the parts of `split_bf16`."""
    return ((hi.astype(np.int64) << 16) + lo).astype(np.uint32).view(np.float32)


def to_bf16(values: F32) -> U16:
    return split_bf16(values)[0]


def from_bf16(bits: U16) -> F32:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_f16(values: F32) -> npt.NDArray[np.float16]:
    """fp32 as fp16, rounded to nearest, ties to even (IEEE 754)."""
    with np.errstate(all="ignore"):
        return values.astype(np.float16)


def load_gradient(grad: Array, dtype: GradDtype) -> F32:
    with np.errstate(all="ignore"):
        return from_bf16(grad) if dtype is GradDtype.BF16 else grad.astype(np.float32)


def accumulate(sums: Array, sum_dtype: GradDtype, grad: Array, dtype: GradDtype) -> None:
    """Adds a gradient to `sums` in place: one fp32 addition, then one rounding (ties to even) to the dtype of
    `sums`."""
    with np.errstate(all="ignore"):
        added: F32 = load_gradient(sums, sum_dtype) + load_gradient(grad, dtype)
        sums[:] = bf16_nearest_even(added) if sum_dtype is GradDtype.BF16 else added.astype(sums.dtype)


def bf16_nearest_even(values: F32) -> U16:
    """The nearest bf16, ties to even, as torch rounds. It is used for sums of gradients; bf16 weights are rounded with
    ties away from zero."""
    bits = np.where(np.isnan(values), np.uint32(0x7FC00000), values.view(np.uint32))
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded: U16 = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    return rounded


def load_weight(weight: Array, weight_format: WeightFormat, aux: Array | None) -> F32:
    """The fp32 values of a weight. They are `weight` itself for fp32, weight and remainder together for
    BF16_REMAINDER, and otherwise `aux`."""
    if weight_format is WeightFormat.F32:
        return weight.astype(np.float32)
    assert aux is not None
    return join_bf16(weight, aux) if weight_format is WeightFormat.BF16_REMAINDER else aux.astype(np.float32)


def store_weight(master: F32, weight: Array, weight_format: WeightFormat, aux: Array | None) -> None:
    """Stores the new fp32 values `master` of a weight: the rounded weight in `weight`, and the remainder or the fp32
    values in `aux` (nothing for an fp32 weight)."""
    if weight_format is WeightFormat.F32:
        weight[:] = master
        return
    assert aux is not None
    if weight_format is WeightFormat.BF16_REMAINDER:
        weight[:], aux[:] = split_bf16(master)
    else:
        weight[:] = to_f16(master) if weight_format is WeightFormat.F16_MASTER else to_bf16(master)
        aux[:] = master


def adamw_update(
    weight: Array,
    weight_format: WeightFormat,
    aux: Array | None,
    exp_avg: F32,
    exp_avg_sq: F32,
    grad: Array,
    grad_dtype: GradDtype,
    scalars: Scalars,
) -> None:
    """One AdamW or Adam update in place. Arrays have one dimension and the same length; `aux` is None for F32."""
    s = {name: np.float32(getattr(scalars, name)) for name in SCALAR_NAMES}
    with np.errstate(all="ignore"):
        p = load_weight(weight, weight_format, aux)
        g = load_gradient(grad, grad_dtype) * s["grad_scale"]
        if scalars.arithmetic is Arithmetic.TORCH:
            p, m, v = _torch_step(p, exp_avg, exp_avg_sq, g, s)
        else:
            p, m, v = _deepspeed_step(p, exp_avg, exp_avg_sq, g, s, scalars.arithmetic is Arithmetic.DEEPSPEED_TAIL)
    exp_avg[:] = m
    exp_avg_sq[:] = v
    store_weight(p, weight, weight_format, aux)


def _torch_step(p: F32, m: F32, v: F32, g: F32, s: Mapping[str, np.float32]) -> tuple[F32, F32, F32]:
    if s["l2"] != 0:
        g = g + s["l2"] * p
    p = p * s["decay"]
    m = m + (g - m) * s["one_minus_beta1"]
    v = v * s["beta2"] + (g * g) * s["one_minus_beta2"]
    denominator: F32 = np.sqrt(v) * s["inverse_bias_correction2_sqrt"] + s["eps"]
    p = p - s["step_size"] * (m / denominator)
    return p, m, v


def _deepspeed_step(p: F32, m: F32, v: F32, g: F32, s: Mapping[str, np.float32], is_tail: bool) -> tuple[F32, F32, F32]:
    """One update step with the arithmetic of DeepSpeed 0.19's cpu_adam. Returns the new weight, and both moments.

    p, m, v, g: weight, both moments and gradient in fp32. s: scalars by name. Sources in DeepSpeed:
    csrc/includes/cpu_adam.h, and csrc/adam/cpu_adam_impl.cpp for the elements after the last full vector (is_tail).
    """
    if s["l2"] != 0:
        g = fma(p, s["l2"], g)
    square = g * g
    if is_tail:
        m = fma(m, s["beta1"], g * s["one_minus_beta1"])
        v = fma(v, s["beta2"], square * s["one_minus_beta2"])
    else:
        m = fma(g, s["one_minus_beta1"], m * s["beta1"])
        v = fma(square, s["one_minus_beta2"], v * s["beta2"])
    quotient = m / fma(np.sqrt(v), s["inverse_bias_correction2_sqrt"], s["eps"])
    if s["decay"] != 0:
        p = fma(p, -s["decay"], p)
    return fma(quotient, -s["step_size"], p), m, v


def fma(a: F32, b: F32 | np.float32, c: F32 | np.float32) -> F32:
    """Fused multiply-add: a × b + c in fp32, rounded once.

    The product is exact in fp64. The fp64 sum is rounded to odd: its last bit is 1 if the sum is inexact, so that the
    second rounding, to fewer than half of the bits, gives the correct result.
    """
    product = a.astype(np.float64) * b.astype(np.float64)
    added = c.astype(np.float64)
    total = product + added
    # The exact rounding error of the sum (Knuth's TwoSum).
    part = total - product
    excess = (total - part - product) - (added - part)
    bits = total.view(np.int64)
    even = np.isfinite(total) & (excess != 0) & (bits & 1 == 0)
    towards_zero = (excess > 0) == (total > 0)
    bits += np.where(even, np.where(towards_zero, -1, 1), 0)
    rounded: F32 = total.astype(np.float32)
    return rounded


def sum_of_squares(elements: Array, dtype: GradDtype) -> tuple[float, int]:
    """The fp64 sum of the squares of all finite elements of one parameter, and the number of elements that are not
    finite."""
    gradient = load_gradient(elements, dtype)
    finite = np.isfinite(gradient)
    values = np.where(finite, gradient, np.float32(0)).astype(np.float64)
    sums = [_block_sum(values[i : i + BLOCK_NUMEL]) for i in range(0, len(values), BLOCK_NUMEL)]
    while len(sums) > 1:
        sums = [sum(sums[i : i + 2]) for i in range(0, len(sums), 2)]
    return (sums[0] if sums else 0.0), int(np.count_nonzero(~finite))


def _block_sum(values: npt.NDArray[np.float64]) -> float:
    """The sum of squares of one block, in a fixed order of additions. Each of 16 accumulators first sums every 16th
    element: accumulator j the elements j, j + 16, … Then the upper half of the accumulators is added to the lower half,
    and so on, until one accumulator is left."""
    rows = -(-len(values) // NUM_ACCUMULATORS)
    padded = np.zeros(rows * NUM_ACCUMULATORS)
    padded[: len(values)] = values
    sums: npt.NDArray[np.float64] = np.zeros(NUM_ACCUMULATORS)
    for row in padded.reshape(rows, NUM_ACCUMULATORS):
        sums = sums + row * row
    while len(sums) > 1:
        half = len(sums) // 2
        sums = sums[:half] + sums[half:]
    return float(sums[0])


def clip_scale(total_norm: float, max_norm: float) -> np.float32:
    """The factor by which gradients of norm `total_norm` are multiplied, so that their norm is at most `max_norm`; 1 if
    it already is. Computed in fp64, then rounded once to fp32."""
    return np.float32(min(1.0, max_norm / (total_norm + 1e-6)))
