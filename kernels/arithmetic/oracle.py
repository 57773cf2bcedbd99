"""Reference implementation of the kernels in NumPy: the specification that every kernel must equal bit for bit.

bf16 is stored as uint16 bits; fp16 is float16. Each operation is rounded once, in the order written here. The
arithmetic of an update rule is in the module `oracle` of the rule's folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tidegate.kernels.arithmetic.formats import GradDtype, WeightFormat

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


OracleStep = Callable[[F32, F32, Sequence[Array], Any], F32]
"""The arithmetic of a rule: `step(weight, grad, tensors, scalars)` returns the new weight, and changes the state
tensors in place. Weight and gradient are fp32."""


def update(
    step: OracleStep,
    weight: Array,
    weight_format: WeightFormat,
    aux: Array | None,
    tensors: Sequence[Array],
    grad: Array,
    grad_dtype: GradDtype,
    scalars: Any,
) -> None:
    """One update in place with the arithmetic of `step`. Arrays have one dimension and the same length; `aux` is None
    for F32; `tensors` are the rule's state tensors."""
    with np.errstate(all="ignore"):
        p = step(load_weight(weight, weight_format, aux), load_gradient(grad, grad_dtype), tensors, scalars)
    store_weight(p, weight, weight_format, aux)


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
