"""Reference implementation, in NumPy, of AdamW as DeepSpeed 0.19's cpu_adam rounds it, with fused multiply-add.

Sources in DeepSpeed: csrc/includes/cpu_adam.h, and csrc/adam/cpu_adam_impl.cpp for the elements after the last full
vector (DEEPSPEED_TAIL).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from tidegate.kernels.adamw.oracle import rounded
from tidegate.kernels.adamw.scalars import Arithmetic, Scalars
from tidegate.kernels.arithmetic import oracle
from tidegate.kernels.arithmetic.oracle import F32


def step(p: F32, g: F32, tensors: Sequence[F32], scalars: Scalars) -> F32:
    """One AdamW or Adam update: changes exp_avg and exp_avg_sq in place, and returns the new weight."""
    (m, v), s = tensors, rounded(scalars)
    g = g * s["grad_scale"]
    if s["l2"] != 0:
        g = fma(p, s["l2"], g)
    square = g * g
    if scalars.arithmetic is Arithmetic.DEEPSPEED_TAIL:
        m[:] = fma(m, s["beta1"], g * s["one_minus_beta1"])
        v[:] = fma(v, s["beta2"], square * s["one_minus_beta2"])
    else:
        m[:] = fma(g, s["one_minus_beta1"], m * s["beta1"])
        v[:] = fma(square, s["one_minus_beta2"], v * s["beta2"])
    quotient = m / fma(np.sqrt(v), s["inverse_bias_correction2_sqrt"], s["eps"])
    if s["decay"] != 0:
        p = fma(p, -s["decay"], p)
    return fma(quotient, -s["step_size"], p)


update = partial(oracle.update, step)


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
