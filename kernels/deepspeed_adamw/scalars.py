"""Scalars of an update (step size, bias correction and others), rounded as in DeepSpeed's cpu_adam.

cpu_adam keeps betas and their powers in fp32: 1 − 0.999f differs from 0.001 by a relative 1.3e-5, and the second
moments differ by as much. It rounds a product and the following sum together (`Arithmetic.DEEPSPEED`).
"""

from __future__ import annotations

import threading

import numpy as np
from cachetools import LRUCache

from tidegate.kernels.adamw.scalars import Arithmetic, Scalars
from tidegate.kernels.arithmetic.formats import to_f32

_powers: LRUCache[tuple[float, int], np.float32] = LRUCache(1024)
"""Cache of the powers that `_power_step_by_step` has computed, by base and exponent. All optimizers of the process
share this cache; their step counts may differ."""
_lock = threading.Lock()


def scalars(
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    decoupled_weight_decay: bool = True,
    grad_scale: float = 1.0,
    several_betas: bool = False,
) -> Scalars:
    """The scalars of update number `step` (from 1).

    several_betas: whether param groups have different betas. cpu_adam then computes the powers of betas at each step in
        double precision; otherwise it multiplies them in fp32, step by step.
    """
    power = _power_in_double if several_betas else _power_step_by_step
    alpha, (first, second) = np.float32(lr), map(np.float32, betas)
    correction1, correction2 = (np.float32(1) - power(beta, step) for beta in betas)
    return Scalars(
        grad_scale=to_f32(grad_scale),
        l2=0.0 if decoupled_weight_decay else to_f32(weight_decay),
        decay=float(alpha * np.float32(weight_decay)) if decoupled_weight_decay else 0.0,
        beta1=float(first),
        one_minus_beta1=float(np.float32(1) - first),
        beta2=float(second),
        one_minus_beta2=float(np.float32(1) - second),
        step_size=float(alpha / correction1),
        inverse_bias_correction2_sqrt=float(np.float32(1) / np.sqrt(correction2)),
        eps=to_f32(eps),
        arithmetic=Arithmetic.DEEPSPEED,
    )


def _power_in_double(base: float, exponent: int) -> np.float32:
    return np.float32(float(np.float32(base)) ** exponent)


def _power_step_by_step(base: float, exponent: int) -> np.float32:
    """The power as a product in fp32, factor by factor. The last powers are kept: the next step needs one more
    factor."""
    with _lock:
        power = _powers.get((base, exponent))
        if power is None:
            before = _powers.get((base, exponent - 1))
            factors = np.full(2 if before is not None else exponent + 1, base, np.float32)
            factors[0] = np.float32(1) if before is None else before
            power = _powers[base, exponent] = np.multiply.accumulate(factors)[-1]
        return power
