"""The arithmetic of DeepSpeed's cpu_adam in torch operations: about 130 passes over memory, most of them in fp64."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tidegate.kernels.adamw.scalars import Arithmetic, Scalars


def step(p: torch.Tensor, g: torch.Tensor, tensors: Sequence[torch.Tensor], s: Scalars) -> torch.Tensor:
    """One update: changes exp_avg and exp_avg_sq in place, and returns the new weight."""
    m, v = tensors
    g = g * s.grad_scale
    if s.l2 != 0.0:
        g = fma(p, s.l2, g)
    square = g * g
    if s.arithmetic is Arithmetic.DEEPSPEED_TAIL:
        m.copy_(fma(m, s.beta1, g * s.one_minus_beta1))
        v.copy_(fma(v, s.beta2, square * s.one_minus_beta2))
    else:
        m.copy_(fma(g, s.one_minus_beta1, m * s.beta1))
        v.copy_(fma(square, s.one_minus_beta2, v * s.beta2))
    quotient = m / fma(v.sqrt(), s.inverse_bias_correction2_sqrt, torch.full_like(v, s.eps))
    if s.decay != 0.0:
        p = fma(p, -s.decay, p)
    return fma(quotient, -s.step_size, p)


def fma(a: torch.Tensor, b: float, c: torch.Tensor) -> torch.Tensor:
    """Fused multiply-add: a × b + c in fp32, rounded once, as in `oracle.fma`. `b` is an fp32 value."""
    product, added = a.double() * b, c.double()
    total = product + added
    part = total - product
    excess = (total - part - product) - (added - part)
    bits = total.view(torch.int64)
    even = total.isfinite() & (excess != 0) & ((bits & 1) == 0)
    towards_zero = (excess > 0) == (total > 0)
    bits += even * (1 - 2 * towards_zero.long())
    return total.float()
