"""Reference implementation of AdamW in NumPy, with + − × ÷ √ in the order of `torch.optim.AdamW`, each rounded once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from tidegate.kernels.adamw.scalars import SCALAR_NAMES, Scalars
from tidegate.kernels.arithmetic import oracle
from tidegate.kernels.arithmetic.oracle import F32


def rounded(scalars: Scalars) -> dict[str, np.float32]:
    """The scalars by name, as fp32."""
    return {name: np.float32(getattr(scalars, name)) for name in SCALAR_NAMES}


def step(p: F32, g: F32, tensors: Sequence[F32], scalars: Scalars) -> F32:
    """One AdamW or Adam update: changes exp_avg and exp_avg_sq in place, and returns the new weight."""
    (m, v), s = tensors, rounded(scalars)
    g = g * s["grad_scale"]
    if s["l2"] != 0:
        g = g + s["l2"] * p
    p = p * s["decay"]
    m[:] = m + (g - m) * s["one_minus_beta1"]
    v[:] = v * s["beta2"] + (g * g) * s["one_minus_beta2"]
    denominator: F32 = np.sqrt(v) * s["inverse_bias_correction2_sqrt"] + s["eps"]
    return p - s["step_size"] * (m / denominator)


update = partial(oracle.update, step)
