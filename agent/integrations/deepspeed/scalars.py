"""Scalars of an update (step size, bias correction and others), rounded as in DeepSpeed's cpu_adam, so that
Tidegate's results are equal bit for bit.

cpu_adam keeps betas and their powers in fp32: 1 − 0.999f differs from 0.001 by a relative 1.3e-5, and the second
moments differ by as much. It rounds a product and the following sum together (`kernels.Arithmetic.DEEPSPEED`). Elements
at the end of an array that do not fill a vector are rounded in another order.
"""

from __future__ import annotations

import threading

import numpy as np

from tidegate.kernels import Arithmetic, Scalars
from tidegate.kernels.arithmetic.scalars import to_f32


class CpuAdamScalars:
    """Computes the scalars of an update, rounded as in cpu_adam. It is used in place of `kernels.scalars`, with the
    same arguments, and may be called from any thread. A resumed run gets the same scalars as an uninterrupted one.

    several_betas: whether param groups have different betas. cpu_adam then computes the powers of betas at each step in
        double precision; otherwise it multiplies them in fp32, step by step.
    """

    def __init__(self) -> None:
        self.several_betas = False
        self._powers: dict[float, tuple[int, np.float32]] = {}
        """For each base: the last exponent, and the base to the power of this exponent."""
        self._lock = threading.Lock()

    def __call__(
        self,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        step: int,
        decoupled: bool = True,
        grad_scale: float = 1.0,
    ) -> Scalars:
        alpha, first, second = np.float32(lr), np.float32(beta1), np.float32(beta2)
        correction1 = np.float32(1) - self._power(beta1, step)
        correction2 = np.float32(1) - self._power(beta2, step)
        return Scalars(
            grad_scale=to_f32(grad_scale),
            l2=0.0 if decoupled else to_f32(weight_decay),
            decay=float(alpha * np.float32(weight_decay)) if decoupled else 0.0,
            beta1=float(first),
            one_minus_beta1=float(np.float32(1) - first),
            beta2=float(second),
            one_minus_beta2=float(np.float32(1) - second),
            step_size=float(alpha / correction1),
            inverse_bias_correction2_sqrt=float(np.float32(1) / np.sqrt(correction2)),
            eps=to_f32(eps),
            arithmetic=Arithmetic.DEEPSPEED,
        )

    def _power(self, base: float, exponent: int) -> np.float32:
        """A beta (`base`) to the power of the number of the update (`exponent`), rounded as in cpu_adam."""
        if self.several_betas:
            return np.float32(float(np.float32(base)) ** exponent)
        with self._lock:
            at, power = self._powers.get(base, (0, np.float32(1)))
            if at > exponent:
                at, power = 0, np.float32(1)
            if at < exponent:
                factors = np.full(exponent - at + 1, base, np.float32)
                factors[0] = power
                power = np.multiply.accumulate(factors)[-1]
                self._powers[base] = exponent, power
            return power
