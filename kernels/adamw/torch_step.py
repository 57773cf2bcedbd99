"""The arithmetic of AdamW in torch operations, in the oracle's order: each operation is rounded once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tidegate.kernels.adamw.scalars import Scalars


def step(p: torch.Tensor, g: torch.Tensor, tensors: Sequence[torch.Tensor], s: Scalars) -> torch.Tensor:
    """One update: changes exp_avg and exp_avg_sq in place, and returns the new weight."""
    m, v = tensors
    g = g * s.grad_scale
    if s.l2 != 0.0:
        g = g + p * s.l2
    p = p * s.decay
    m.add_((g - m) * s.one_minus_beta1)
    v.mul_(s.beta2).add_((g * g) * s.one_minus_beta2)
    return p - (m / (v.sqrt() * s.inverse_bias_correction2_sqrt + s.eps)) * s.step_size
